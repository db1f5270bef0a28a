"""vLLM engine in separate processes.

Weights arrive through vLLM's weight-transfer API (rollouts/engines/vllm_support/worker.py). With LoRA, only an adapter
arrives, beside the base weights. Each update clears the prefix cache and the image cache. vLLM is imported when an
engine is created, after its environment variables are set.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, ClassVar, TypeVar

import torch

from core.errors import ProcessDied, RunStopped
from core.gc_control import without_gc
from core.timing.deadlines import ENGINE_DEATH_GRACE_S, ENGINE_POLL_S, ENGINE_RPC_GRACE_S, ENGINE_SHUTDOWN_TIMEOUT_S
from rollouts.engines.base import Capabilities, EngineConfig
from rollouts.engines.sleeping import WakePart
from rollouts.engines.vllm_support.common import VllmBase, _raise_first
from rollouts.engines.vllm_support.sockets import place_sockets
from trainers.weight_sync.base import Chunk

_DIED = (
    "vLLM's own process died; its last output is in the log of this worker, in logs/ of the run folder (with "
    "ray_address in Ray's session folder)"
)
T = TypeVar("T")


class VllmEngine(VllmBase):
    """Engine on vLLM's AsyncLLM: separate engine and worker processes, with continuous batching."""

    capabilities = Capabilities(
        tensor_parallel=True,
        broadcast=True,
        nccl=True,
        chunks=True,
        adapter=True,
        images=True,
        allowed_tokens=True,
        stop_strings=True,
        sleep=True,
        ipc=True,
        in_process="vllm_local",
    )
    stat_loggers: ClassVar[Sequence[Any]] = ()
    """Classes of vLLM's StatLoggerBase, for a subclass that counts iterations."""

    def __init__(self, config: EngineConfig) -> None:
        self._transfer = "feynrl_nccl" if config.over_nccl else "feynrl_ipc" if config.over_ipc else "feynrl_gloo"
        self._takes_chunks = self._paused = False
        super().__init__(config)

    def _start(self) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        place_sockets()
        with without_gc():
            from vllm import AsyncEngineArgs
            from vllm.config import WeightTransferConfig
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            from rollouts.engines.vllm_support.executor import CoreExecutor

        executor = None if torch.cuda.is_available() else CoreExecutor
        if self._args["tensor_parallel_size"] > 1:
            executor = "mp"  # within a placement group vLLM would take Ray, and place its workers itself
        args = AsyncEngineArgs(
            **self._args,
            weight_transfer_config=WeightTransferConfig(backend=self._transfer),
            distributed_executor_backend=executor,
        )
        # the defaults of a server keep few requests in a batch, since its users wait for the next token
        offline = UsageContext.LLM_CLASS
        self._llm = AsyncLLM.from_engine_args(args, usage_context=offline, stat_loggers=[*self.stat_loggers])
        self._requests = count()

    async def join_broadcast(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        """Join the sender's group with ranks `first_rank`, `first_rank` + 1, ... for this engine's workers."""
        self._takes_chunks = False
        where = {"address": address, "port": port, "first_rank": first_rank, "members": members}
        _raise_first(await self._rpc("feynrl_join", kwargs={"init_info": {**where, "timeout_s": self._timeout_s}}))

    async def begin_chunks(self) -> None:
        self._check_paused()
        self._takes_chunks = True
        await self._begin_update()

    async def load_chunk(self, chunk: Chunk) -> None:
        await self._load_part({"chunk": chunk})

    async def pause(self) -> None:
        """Keep, finish or abort running requests, as `weight_sync.pause_mode` says. New requests wait.

        vLLM does not finish requests that it has preempted for lack of cache. They wait, and continue as with `keep`.
        """
        if not self._sleeper.may_sample:
            return  # it was paused when it went to sleep
        # Finishing takes as long as the longest completion; its deadline is that of every remote call, timeout_s.
        async with asyncio.timeout(None if self._request_mode == "wait" else self._timeout_s):
            # the cache is cleared after the update, in _resume
            await self._while_alive(self._llm.pause_generation(mode=self._request_mode, clear_cache=False))
        self._paused = True

    async def receive_weights(self, version: int) -> None:
        self._check_paused()
        await (self._finish_update(version) if self._takes_chunks else self._update(version, {}))
        await self._resume(version)

    async def sleep(self) -> None:
        self._sleeper.fall_asleep(running=self._running)
        async with asyncio.timeout(self._timeout_s):
            await self._while_alive(self._llm.sleep(level=self._sleep_level, mode="keep"))
        self._paused = True

    async def wake(self, part: WakePart) -> None:
        """Wake a part. vLLM accepts requests again when both parts are awake."""
        self._sleeper.wake(part)
        async with asyncio.timeout(self._timeout_s):
            await self._while_alive(self._llm.wake_up([part]))
        self._paused = part != "kv_cache"

    def _check_paused(self) -> None:
        self._sleeper.check_loading()
        if not self._paused:
            raise RuntimeError("pause() comes before an update: requests would run while their weights are replaced")

    async def _resume(self, version: int) -> None:
        async def resume() -> None:
            # before requests go on: vLLM labels the tokens with it
            await self._llm.update_weight_version(str(version))
            # Kept requests are computed again from their tokens, or old keys and values would stay in use.
            await self._llm.reset_prefix_cache(reset_running_requests=True)
            if self._sees:
                await self._llm.reset_encoder_cache()  # after that: what was computed of images, by their hashes
            if self._sleeper.may_sample:  # else it resumes when its cache wakes
                await self._llm.resume_generation()

        async with asyncio.timeout(self._timeout_s):
            await self._while_alive(resume())
        self._paused = not self._sleeper.may_sample

    async def close(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown(timeout=ENGINE_SHUTDOWN_TIMEOUT_S)
        del self._llm  # its finalizer fails when it runs at the interpreter's exit

    async def _request(
        self, prompt: dict[str, Any], params: Any, ends: Callable[[list[int]], bool] | None = None
    ) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        name = str(next(self._requests))
        request = self._llm.generate(
            prompt,
            params,
            request_id=name,
            lora_request=self._adapter_of_requests(),
        )
        try:
            async with aclosing(request) as answers:
                async for answer in answers:
                    if answer.finished:
                        return answer
                    if ends is not None and ends(answer.outputs[0].token_ids):
                        # one abort is enough, and more answers may be on the way
                        ends = None
                        await self._llm.abort(name)  # the last answer follows, with the versions of all tokens
        except EngineDeadError as error:
            raise ProcessDied(_DIED) from error
        raise RunStopped("vLLM ended a request without a result")

    async def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        # longer than the deadline inside the call, which raises the more precise error
        async with asyncio.timeout(self._timeout_s + ENGINE_RPC_GRACE_S):
            return await self._while_alive(self._llm.collective_rpc(method, kwargs=kwargs))

    async def _while_alive(self, call: Awaitable[T]) -> T:
        """Await `call`. Raises ProcessDied if vLLM's process died, since the call would never return."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=ENGINE_POLL_S)
                if self._llm.errored and not task.done():
                    raise ProcessDied(_DIED)
            return task.result()
        except EngineDeadError as error:
            raise ProcessDied(_DIED) from error
        except Exception as error:
            # a worker's death cancels what vLLM does, with an error of no class of its own, before vLLM tells it
            if not isinstance(error, RunStopped) and await self._is_dying():
                raise ProcessDied(_DIED) from error
            raise
        finally:
            task.cancel()

    async def _is_dying(self) -> bool:
        """Return whether vLLM reports the death of a process within a moment."""
        until = asyncio.get_running_loop().time() + ENGINE_DEATH_GRACE_S
        while not self._llm.errored and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(ENGINE_POLL_S / 5)
        return self._llm.errored
