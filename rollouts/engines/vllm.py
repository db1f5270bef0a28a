"""vLLM behind the `Engine` interface, in processes of its own.

Weights come through vLLM's weight-transfer API (rollouts/engines/vllm_worker.py), or an adapter alone beside the
model's own weights; the prefix cache is cleared with every update. vLLM is imported when an engine is made, after
its environment is set.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from contextlib import aclosing
from itertools import count
from typing import Any, Literal, TypeVar

from configs.rollout_schema import UpdateMode
from core.errors import ProcessDied, RunStopped
from rollouts.engines.vllm_common import VllmConfig, _raise_first, _Vllm
from weight_sync.chunks import Parcel

_POLL_S = 0.5
_GRACE_S = 2.0
"""So much later than the deadlines of vLLM's workers ends the wait for them."""
_DIED = "vLLM's own process died; what it said last is in the log of this worker, in Ray's session folder"
T = TypeVar("T")
_PAUSES: dict[UpdateMode, Literal["keep", "wait", "abort"]] = {"in_flight": "keep", "drain": "wait", "abort": "abort"}
"""What vLLM does with the requests it is answering; all three queue new ones."""


class VllmEngine(_Vllm):
    """AsyncLLM: engine and workers run in processes of their own, requests are batched as they come."""

    def __init__(self, config: VllmConfig, *, over_nccl: bool = False) -> None:
        """over_nccl: an `NcclSender` will send the weights, which takes GPUs at both ends."""
        self._transfer = "feynrl_nccl" if over_nccl else "feynrl_gloo"
        self._fed = self._held = False
        super().__init__(config)

    def _start(self) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**self._settings, weight_transfer_config=WeightTransferConfig(backend=self._transfer))
        )
        self._requests = count()

    async def join(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        """Make this engine's workers members `first_rank`, `first_rank` + 1, ... of the sender's group.

        From now on weights come from there.
        """
        self._fed = False
        where = {"address": address, "port": port, "first_rank": first_rank, "members": members}
        _raise_first(await self._rpc("feynrl_join", kwargs={"init_info": {**where, "timeout_s": self._timeout_s}}))

    async def open_feed(self) -> None:
        """From now on weights come by `feed`, between a `hold` and a `receive`."""
        self._must_be_held()
        self._fed = True
        await self._begin()

    async def feed(self, parcel: Parcel) -> None:
        await self._bring({"parcel": parcel})

    async def hold(self) -> None:
        """Keep, finish or cut off what runs, as `update` says; new requests wait. `receive` lets all go on."""
        # A drain is as long as the longest completion, and its deadline that of every remote call, the run's timeout_s.
        # What vLLM has preempted for want of cache is not drained: it waits, and goes on as with in_flight.
        async with asyncio.timeout(None if self._on_update == "drain" else self._timeout_s):
            await self._while_alive(self._llm.pause_generation(mode=_PAUSES[self._on_update], clear_cache=False))
        self._held = True

    async def receive(self, version: int) -> None:
        """Take part in one `WeightSender.send`, or complete what was fed; after a `hold`."""
        self._must_be_held()
        await (self._finish(version) if self._fed else self._update(version, {}))
        await self._go_on(version)

    def _must_be_held(self) -> None:
        if not self._held:
            raise RuntimeError("an update without hold: requests would run while their weights are replaced")

    async def _go_on(self, version: int) -> None:
        async def go_on() -> None:
            await self._llm.update_weight_version(str(version))
            # What was kept is computed anew from its tokens, or old keys and values would live on in it.
            await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._llm.resume_generation()

        async with asyncio.timeout(self._timeout_s):
            await self._while_alive(go_on())
        self._held = False

    async def close(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown(timeout=10.0)
        del self._llm  # its finalizer fails when it runs at the interpreter's exit

    async def _ask(self, token_ids: list[int], params: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        request = self._llm.generate(
            {"prompt_token_ids": token_ids},
            params,
            request_id=str(next(self._requests)),
            lora_request=self._adapter(),
        )
        try:
            async with aclosing(request) as answers:
                async for answer in answers:
                    return answer
        except EngineDeadError as error:
            raise ProcessDied(_DIED) from error
        raise RunStopped("vLLM ended a request without an answer")

    async def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        async with asyncio.timeout(self._timeout_s + _GRACE_S):
            return await self._while_alive(self._llm.collective_rpc(method, kwargs=kwargs))

    async def _while_alive(self, call: Awaitable[T]) -> T:
        """Await `call`, and raise ProcessDied once vLLM's own process is gone: vLLM would leave it unanswered."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_POLL_S)
                if self._llm.errored and not task.done():
                    raise ProcessDied(_DIED)
            return task.result()
        except EngineDeadError as error:
            raise ProcessDied(_DIED) from error
        finally:
            task.cancel()
