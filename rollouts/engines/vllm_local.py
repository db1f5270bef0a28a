"""vLLM engine in the caller's process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Any

from core.errors import RunStopped
from core.types.weights import Bucket
from rollouts.engines.base import Capabilities
from rollouts.engines.sleeping import WakePart
from rollouts.engines.vllm_support.common import VllmBase
from rollouts.engines.vllm_support.patches import keeping_threads


class LocalVllmEngine(VllmBase):
    """Engine on vLLM's LLM class, one rank, for `backend: local` on a CPU.

    Requests of one event-loop iteration run as one batch, which blocks the process.
    """

    capabilities = Capabilities(adapter=True, images=True, allowed_tokens=True, stop_strings=True, sleep=True)

    def _start(self) -> None:
        # 0: vLLM's engine runs in this process, so the trainer's tensors can be passed by reference
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        with keeping_threads():
            self._llm = LLM(**self._args, weight_transfer_config=WeightTransferConfig(backend="feynrl_local"))
        self._waiting: list[tuple[dict[str, Any], Any, asyncio.Future[Any]]] = []

    async def pause(self) -> None:
        """Return immediately. A batch blocks the process, so no request is running."""

    async def load_weights(self, version: int, buckets: Iterable[Bucket]) -> None:
        """Load weights from the trainer in this process."""
        self._sleeper.check_loading()
        await self._update(version, {"buckets": buckets})
        self._llm.update_weight_version(str(version))
        # cached keys and values of prompts are those of the old weights
        if not self._llm.reset_prefix_cache():
            raise RunStopped(f"vLLM did not clear its prefix cache for version {version}")
        if self._sees:
            self._llm.llm_engine.reset_encoder_cache()

    async def sleep(self) -> None:
        self._sleeper.fall_asleep(running=self._running)
        self._llm.sleep(level=self._sleep_level, mode="keep")

    async def wake(self, part: WakePart) -> None:
        self._sleeper.wake(part)
        self._llm.wake_up([part])

    async def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    async def _request(
        self, prompt: dict[str, Any], params: Any, ends: Callable[[list[int]], bool] | None = None
    ) -> Any:
        """Return the whole answer. A batch cannot end early; text after a stop string is cut later."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, params, answer))
        if len(self._waiting) == 1:
            await asyncio.sleep(0)  # the first request runs all others of this event-loop iteration
            self._answer_all()
        return await answer

    def _answer_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        prompts = [prompt for prompt, _, _ in waiting]
        params = [params for _, params, _ in waiting]
        answers = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter_of_requests())
        for (_, _, future), answer in zip(waiting, answers, strict=True):
            future.set_result(answer)

    async def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        return self._llm.collective_rpc(method, kwargs=kwargs)
