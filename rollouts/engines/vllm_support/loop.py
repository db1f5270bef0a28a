"""vLLM's LLMEngine in this process, on a thread of its own.

vLLM's separate engine process would serialise every request and every sampled token; here both are objects. Requests
that arrive during an iteration join the next one together. An iteration is one forward pass over a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeVar

from configs.sync_schema import PauseMode
from core.errors import ProcessDied, RunStopped
from core.timing.deadlines import ENGINE_DEATH_GRACE_S, ENGINE_POLL_S

T = TypeVar("T")
_DIED = (
    "a process of vLLM died; its last output is in the log of this worker, in logs/ of the run folder (with "
    "ray_address in Ray's session folder)"
)


class Span(NamedTuple):
    """Sampled tokens of one version of the weights, as vLLM's WeightVersionSpan."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class _Request:
    """Request that waits or runs."""

    name: str
    prompt: dict[str, Any]
    params: Any
    """vLLM's SamplingParams."""
    adapter: Any
    """vLLM's LoRARequest, or None."""
    ends: Callable[[list[int]], bool] | None
    """Whether the tokens sampled so far complete a stop string. None: vLLM alone ends the request."""
    answer: asyncio.Future[Any]
    output: Any = None
    """vLLM's last output of the request."""
    spans: list[Span] = field(default_factory=list[Span])
    """Versions of the tokens so far. vLLM reports them at a request's own end only."""
    refusal: Exception | None = None
    """vLLM's error when it was given the request."""


class EngineLoop:
    """Queue of requests to vLLM, and the loop of iterations that runs while there are any."""

    def __init__(self, make_engine: Callable[[], Any]) -> None:
        """Create vLLM's LLMEngine by `make_engine`, on the thread on which everything of vLLM runs."""
        # One thread: an update cannot meet an iteration, and OpenMP's threads, which belong to the thread that
        # started them, are made once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self.llm = self._thread.submit(make_engine).result()
        self._names = count()
        self._queued: list[_Request] = []
        """Requests that vLLM has not been given."""
        self._live: dict[str, _Request] = {}
        """Requests of vLLM."""
        self._dropped: list[str] = []
        """Requests of vLLM that have ended on our side."""
        self._iterating: asyncio.Task[None] | None = None
        self._admits = self._steps = True
        """Whether vLLM is given new requests, and whether iterations run. An update pauses both."""

    @property
    def is_paused(self) -> bool:
        return not self._steps

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function on vLLM's thread, between iterations. Raises ProcessDied if a worker process died."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        except Exception as error:
            # a worker's death fails the call with an error of no class of its own, before vLLM tells it
            if not isinstance(error, RunStopped) and await self._lost_worker():
                raise ProcessDied(_DIED) from error
            raise

    async def request(
        self,
        prompt: dict[str, Any],
        params: Any,
        *,
        adapter: Any = None,
        ends: Callable[[list[int]], bool] | None = None,
    ) -> Any:
        """Run a request until vLLM or `ends` ends it. Return vLLM's last output.

        None: an update aborted it before the first token.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = _Request(str(next(self._names)), prompt, params, adapter, ends, answer)
        self._queued.append(request)
        self._iterate_while_busy()
        try:
            return await answer
        except asyncio.CancelledError:
            if request in self._queued:
                self._queued.remove(request)
            elif self._live.pop(request.name, None) is not None:
                self._dropped.append(request.name)
            raise

    async def pause(self, mode: PauseMode) -> None:
        """Stop iterations. Running requests are kept, finished first (wait) or aborted, and new ones wait."""
        self._admits = False
        if mode == "wait" and self._iterating is not None:
            await asyncio.wait([self._iterating])
        self._steps = False
        if self._iterating is not None:
            await asyncio.wait([self._iterating])
        self._finish_requests(await self.call(self._drain))
        if mode == "abort":
            aborted, self._live = self._live, {}
            self._dropped += aborted
            for request in aborted.values():
                _answer(request)

    def resume(self) -> None:
        self._admits = self._steps = True
        self._iterate_while_busy()

    async def close(self) -> None:
        """End vLLM, and its processes if it has any."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.llm.engine_core.shutdown)
        self._thread.shutdown()
        del self.llm

    @property
    def _is_busy(self) -> bool:
        return self._steps and bool(self._live or self._dropped or (self._queued and self._admits))

    def _iterate_while_busy(self) -> None:
        if self._iterating is None and self._is_busy:
            self._iterating = asyncio.create_task(self._run_iterations())

    async def _run_iterations(self) -> None:
        """Run iterations until there is nothing to do, or until a pause."""
        try:
            await asyncio.sleep(0)  # the other requests of this turn of the event loop join the first batch
            while self._is_busy:
                queued: list[_Request] = []
                if self._admits:
                    queued, self._queued = self._queued, []
                dropped, self._dropped = self._dropped, []
                self._live |= {request.name: request for request in queued}
                self._finish_requests(await self.call(self._iterate, queued, dropped))
                for request in queued:
                    # popped: its caller may have given up meanwhile
                    if request.refusal is not None and self._live.pop(request.name, None) is not None:
                        request.answer.set_exception(request.refusal)
        except Exception as error:
            # vLLM cannot go on after a failed iteration
            died = error
            if not isinstance(error, ProcessDied):
                died = ProcessDied(f"vLLM failed: {error!r}")
                died.__cause__ = error
            failed = [*self._live.values(), *self._queued]  # those that came meanwhile, too
            self._live, self._queued = {}, []
            for request in failed:
                if not request.answer.done():
                    request.answer.set_exception(died)
        finally:
            self._iterating = None

    def _iterate(self, queued: Sequence[_Request], dropped: list[str]) -> list[Any]:
        """Give vLLM the new requests, and run one iteration. Return the outputs that vLLM reports."""
        for request in queued:
            try:
                self.llm.add_request(request.name, request.prompt, request.params, lora_request=request.adapter)
            except Exception as error:  # of this request alone
                request.refusal = error
        if dropped:
            self.llm.abort_request(dropped)
        return self.llm.step()

    def _drain(self) -> list[Any]:
        """Finish the iterations that vLLM has begun ahead. Return their outputs."""
        core = self.llm.engine_core.engine_core
        core.pause_scheduler("keep", clear_cache=False)
        outputs: list[Any] = []
        while core.batch_queue:
            outputs += self.llm.step()
        core.resume_scheduler()
        return outputs

    def _finish_requests(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            request = self._live.get(output.request_id)
            if request is None:
                continue  # its caller gave up
            request.output = output
            if not output.finished:
                _track_version(request, self.llm.get_weight_version())
                if request.ends is None or not request.ends(output.outputs[0].token_ids):
                    continue
                self._dropped.append(request.name)
            del self._live[request.name]
            _answer(request)

    async def _lost_worker(self) -> bool:
        """Return whether vLLM reports the death of a worker process within a moment."""
        executor = self.llm.model_executor
        if not hasattr(executor, "is_failed"):
            return False  # its only worker is in this process
        until = asyncio.get_running_loop().time() + ENGINE_DEATH_GRACE_S
        while not executor.is_failed and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(ENGINE_POLL_S)
        return executor.is_failed


def _track_version(request: _Request, version: str) -> None:
    end = len(request.output.outputs[0].token_ids)
    if request.spans and request.spans[-1].version == version:
        request.spans[-1] = request.spans[-1]._replace(end=end)
    else:
        request.spans.append(Span(version, request.spans[-1].end if request.spans else 0, end))


def _answer(request: _Request) -> None:
    if request.output is not None and not request.output.finished:
        request.output.outputs[0].weight_versions = request.spans
    if not request.answer.done():
        request.answer.set_result(request.output)
