"""The loop of vLLM's iterations: what joins a batch, and what a pause, a cancellation or an error does to requests."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.rollout_schema import SleepMode
from configs.sync_schema import PauseMode
from configs.trainer_schema import LoraConfig
from core.errors import ProcessDied, RunStopped
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.loop import EngineLoop
from tools.benchmarks.simulated_run import run_in_virtual_time
from unit_tests.helpers.vllm_lab import SETTINGS


class OneTokenAnIteration:
    """In place of vLLM's LLMEngine: every iteration gives every request a token; params are the number of them."""

    def __init__(self, seconds: float = 0.0, ahead: int = 0) -> None:
        self.seconds = seconds
        self.requests: dict[str, tuple[int, list[int]]] = {}
        self.batches: list[list[str]] = []
        self.aborted: list[str] = []
        self.slept: list[Any] = []
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {}
        self.given: list[tuple[str, Any]] = []
        self.closed = self.fails = self.held = False
        self.version = "3"
        core = SimpleNamespace(pause_scheduler=self._hold, resume_scheduler=self._go_on, batch_queue=[None] * ahead)
        self.engine_core = SimpleNamespace(engine_core=core, shutdown=self._close)
        self.model_executor = SimpleNamespace()

    def add_request(self, name: str, prompt: dict[str, Any], params: int, *, lora_request: Any) -> None:
        if params < 1:
            raise ValueError("no tokens are wanted")
        self.requests[name] = (params, [])

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.requests.pop(name, None)

    def get_weight_version(self) -> str:
        return self.version

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        self.calls.append(method)
        self.given.append((method, kwargs))
        return self.answers.get(method, ["", ""])

    def set_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.calls.append(f"reset_prefix_cache {reset_running_requests}")
        return self.answers.get("reset_prefix_cache", True)

    def reset_encoder_cache(self) -> None:
        self.calls.append("reset_encoder_cache")

    def sleep(self, level: int, mode: str) -> None:
        self.slept.append((level, mode))

    def wake_up(self, parts: list[str]) -> None:
        self.slept += parts

    def step(self) -> list[Any]:
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("device-side assert")
        if self.held:  # vLLM begins nothing more
            self.engine_core.engine_core.batch_queue.pop()
        self.batches.append([*self.requests])
        outputs = []
        for name, (wanted, tokens) in [*self.requests.items()]:
            tokens.append(len(tokens))
            if ended := len(tokens) == wanted:
                del self.requests[name]
            said = SimpleNamespace(token_ids=[*tokens])
            outputs.append(SimpleNamespace(request_id=name, finished=ended, outputs=[said]))
        return outputs

    def _hold(self, mode: str, *, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.held = True

    def _go_on(self) -> None:
        self.held = False

    def _close(self) -> None:
        self.closed = True


def loop_of(**settings: Any) -> tuple[EngineLoop, OneTokenAnIteration]:
    llm = OneTokenAnIteration(**settings)
    return EngineLoop(lambda: llm), llm


def tokens_of(output: Any) -> list[int]:
    return output.outputs[0].token_ids


def test_requests_of_one_moment_share_all_iterations_and_later_ones_join() -> None:
    async def body() -> None:
        loop, llm = loop_of()
        done = await asyncio.gather(*(loop.request({}, 3) for _ in range(5)))
        assert [tokens_of(output) for output in done] == [[0, 1, 2]] * 5
        assert [len(batch) for batch in llm.batches] == [5, 5, 5]
        llm.batches.clear()
        llm.seconds = 0.01
        first = asyncio.create_task(loop.request({}, 50))
        while not llm.batches:
            await asyncio.sleep(0)
        await asyncio.gather(*(loop.request({}, 1) for _ in range(3)))
        await first
        assert [len(batch) for batch in llm.batches].count(4) == 1 and len(llm.batches) == 50
        await loop.close()
        assert llm.closed

    asyncio.run(body())


def test_a_request_of_the_next_moment_still_joins_the_first_batch() -> None:
    async def body() -> None:
        loop, llm = loop_of()

        async def ask_later() -> None:
            await asyncio.sleep(0)
            await loop.request({}, 2)

        await asyncio.gather(loop.request({}, 2), ask_later())
        assert llm.batches == [["0", "1"]] * 2
        await loop.close()

    asyncio.run(body())


def test_a_request_ends_where_its_text_does_and_vllm_drops_it() -> None:
    async def body() -> None:
        loop, llm = loop_of()
        output = await loop.request({}, 50, ends=lambda tokens: len(tokens) == 4)
        assert tokens_of(output) == [0, 1, 2, 3] and not output.finished
        assert output.outputs[0].weight_versions == [("3", 0, 4)]
        await asyncio.sleep(0.05)
        assert llm.aborted == ["0"] and not llm.requests
        await loop.close()

    asyncio.run(body())


def test_a_cancelled_request_is_dropped_wherever_it_is() -> None:
    async def body() -> None:
        loop, llm = loop_of(seconds=0.01)
        running = asyncio.create_task(loop.request({}, 1000))
        while not llm.batches:
            await asyncio.sleep(0.001)
        await loop.pause("keep")
        waiting = asyncio.create_task(loop.request({}, 1000))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        loop.resume()
        other = await loop.request({}, 2)
        assert tokens_of(other) == [0, 1] and llm.aborted == ["0"] and not llm.requests
        await loop.close()

    asyncio.run(body())


def test_a_request_cancelled_in_an_iteration_gets_nothing_of_it() -> None:
    async def body() -> None:
        (loop, llm), here = loop_of(), asyncio.get_running_loop()
        usual = llm.step

        async def give_up() -> None:
            leaving.cancel()
            await asyncio.wait([leaving])

        def step() -> list[Any]:
            llm.step = usual
            asyncio.run_coroutine_threadsafe(give_up(), here).result(10)
            return usual()

        llm.step = step
        leaving, staying = (asyncio.create_task(loop.request({}, 3)) for _ in range(2))
        assert tokens_of(await staying) == [0, 1, 2] and leaving.cancelled()
        assert llm.aborted == ["0"] and llm.batches == [["0", "1"], ["1"], ["1"]]
        await loop.close()

    asyncio.run(body())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_treats_requests_as_its_mode_says(mode: PauseMode) -> None:
    async def body() -> None:
        loop, llm = loop_of(seconds=0.005, ahead=2)
        running = asyncio.create_task(loop.request({}, 20))
        while not llm.batches:
            await asyncio.sleep(0.001)
        pausing = asyncio.create_task(loop.pause(mode))
        await asyncio.sleep(0)
        late = asyncio.create_task(loop.request({}, 2))
        await pausing
        assert loop.is_paused and not llm.engine_core.engine_core.batch_queue, "what was begun ahead is finished"
        paused_at = len(llm.batches)
        await asyncio.sleep(0.05)
        assert len(llm.batches) == paused_at and not late.done()
        assert running.done() == (mode != "keep")
        if mode == "abort":
            assert 0 < len(tokens_of(running.result())) < 20
        loop.resume()
        assert tokens_of(await late) == [0, 1]
        if mode != "abort":
            assert tokens_of(await running) == [*range(20)]
        assert llm.aborted == (["0"] if mode == "abort" else [])
        await loop.close()

    asyncio.run(body())


def test_a_refused_request_fails_alone_and_a_failed_iteration_ends_vllm() -> None:
    async def body() -> None:
        loop, llm = loop_of()
        good, bad = await asyncio.gather(loop.request({}, 2), loop.request({}, 0), return_exceptions=True)
        assert tokens_of(good) == [0, 1] and isinstance(bad, ValueError)
        llm.fails = True
        for _ in range(2):
            with pytest.raises(ProcessDied, match=r"vLLM failed: RuntimeError.*device-side assert") as died:
                await loop.request({}, 2)
            assert isinstance(died.value.__cause__, RuntimeError), "whose traceback says where it failed"
        llm.seconds = 0.05
        first = asyncio.create_task(loop.request({}, 2))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(loop.request({}, 2))
        done = await asyncio.wait_for(asyncio.gather(first, late, return_exceptions=True), timeout=5)
        assert [type(error) for error in done] == [ProcessDied, ProcessDied]
        await loop.close()

    asyncio.run(body())


class Workers:
    """In place of vLLM's executor: it reports the death of a process late."""

    def __init__(self, reported_at: float) -> None:
        self.reported_at = reported_at

    @property
    def is_failed(self) -> bool:
        return asyncio.get_running_loop().time() >= self.reported_at


def test_a_failed_call_is_a_death_if_vllm_reports_one_soon_after() -> None:
    def fail() -> None:
        raise RuntimeError("connection reset")

    async def body() -> None:
        loop, llm = loop_of()
        with pytest.raises(RuntimeError, match=r"^connection reset$"):
            await loop.call(fail)  # the only worker is in this process
        llm.model_executor = Workers(reported_at=0.0)
        with pytest.raises(ProcessDied, match=r"^a process of vLLM died; its last output is in the log of this w"):
            await loop.call(fail)
        await loop.close()

    async def wait() -> None:
        loop, llm = loop_of()
        found: list[tuple[bool, float]] = []
        for after in (0.0, 1.2, 9.0):
            begun = asyncio.get_running_loop().time()
            llm.model_executor = Workers(reported_at=begun + after)
            found.append((await loop._lost_worker(), asyncio.get_running_loop().time() - begun))
        assert found == [(True, 0.0), (True, 1.5), (False, 5.0)]
        loop._thread.shutdown()

    asyncio.run(body())
    run_in_virtual_time(wait())


class SlowEngine(VllmEngine):
    def _start(self, args: dict[str, Any], options: Any, *, transfer: str, cores: Any) -> None:
        self._loop = EngineLoop(lambda: OneTokenAnIteration(seconds=0.2))


def test_a_drain_may_take_longer_than_a_step_of_an_update(tiny_path: str) -> None:
    async def pause(mode: PauseMode) -> None:
        engine = SlowEngine(EngineConfig(model_path=tiny_path, pause_mode=mode, timeout_s=0.1, **SETTINGS))
        running = asyncio.create_task(engine._loop.request({}, 3))
        await asyncio.sleep(0.01)
        try:
            await engine.pause()
            assert running.done()
            await engine._loop.pause("keep")
        finally:
            await asyncio.wait([running], timeout=1)
            await engine.close()

    asyncio.run(pause("wait"))
    for mode in ("keep", "abort"):
        with pytest.raises(TimeoutError):
            asyncio.run(pause(mode))


class QuickEngine(VllmEngine):
    def _start(self, args: dict[str, Any], options: Any, *, transfer: str, cores: Any) -> None:
        self.transfer, self.llm = transfer, OneTokenAnIteration()
        self._loop = EngineLoop(lambda: self.llm)


@pytest.mark.parametrize(("mode", "level"), [("offload", 1), ("discard", 2)])
def test_an_engine_sleeps_as_deeply_as_its_mode_says(tiny_path: str, mode: SleepMode, level: int) -> None:
    """vLLM keeps the weights in host memory at level 1, and discards them at level 2."""

    async def body() -> None:
        engine = QuickEngine(EngineConfig(model_path=tiny_path, sleep=mode, **SETTINGS))
        await engine.sleep()
        assert engine.llm.slept == [(level, "keep")] and engine._loop.is_paused
        await engine.wake("weights")
        assert engine._loop.is_paused
        await engine.wake("kv_cache")
        assert engine.llm.slept[1:] == ["weights", "kv_cache"] and not engine._loop.is_paused
        await engine.close()

    asyncio.run(body())


def test_weights_come_over_the_transfer_of_the_settings(tiny_path: str) -> None:
    for settings, transfer in (({}, "gloo"), ({"over_nccl": True}, "nccl"), ({"over_ipc": True}, "ipc")):
        engine = QuickEngine(EngineConfig(model_path=tiny_path, **settings, **SETTINGS))
        assert engine.transfer == f"feynrl_{transfer}" and not engine.llm.closed
        asyncio.run(engine.close())
        assert engine.llm.closed


def test_a_request_of_the_engine_ends_where_its_text_does(tiny_path: str) -> None:
    async def body() -> None:
        engine = QuickEngine(EngineConfig(model_path=tiny_path, **SETTINGS))
        output = await engine._ask([1, 2], (), 50, lambda tokens: len(tokens) == 4)
        with pytest.raises(ValueError, match="no tokens are wanted"):
            await engine._ask([1, 2], (), 0)
        assert tokens_of(output) == [0, 1, 2, 3]
        await engine.sleep()  # no request is left
        await engine.close()

    asyncio.run(body())


LOADS = ["feynrl_begin", "feynrl_load_part"]
WHOLE = [*LOADS, "finish_weight_update", "feynrl_untouched", "version 8", "reset_prefix_cache True"]
LORA = {"lora": LoraConfig(r=4, targets=["model.layers.0.mlp.up_proj"])}


@pytest.mark.parametrize(
    ("settings", "answers", "calls", "said"),
    [
        ({}, {"feynrl_untouched": [[], []]}, WHOLE, ""),
        ({"sees": True}, {"feynrl_untouched": [[], []]}, [*WHOLE, "reset_encoder_cache"], ""),
        (LORA, {"feynrl_load_adapter": [[], []]}, [*LOADS, "feynrl_load_adapter", *WHOLE[-2:]], ""),
        (
            {},
            {"feynrl_untouched": [[], ["a", "b"]]},
            WHOLE[:-2],
            "the sync of version 8 had no values for 2 parameters of rank 1, such as a",
        ),
        (
            LORA,
            {"feynrl_load_adapter": [[], ["a", "b"]]},
            [*LOADS, "feynrl_load_adapter"],
            "the sync of version 8 sent an adapter for 2 layers that vLLM's model does not have (rank 1), such as a: "
            "set weight_sync.lora to merged",
        ),
        (
            {"sees": True},
            {"feynrl_untouched": [[]], "reset_prefix_cache": False},
            WHOLE,
            "vLLM did not clear its prefix cache for version 8",
        ),
        ({}, {"feynrl_load_part": ["", "no chunk"]}, LOADS, "rank 1: no chunk"),
    ],
)
def test_an_update_is_checked_and_what_was_computed_before_is_cleared(tiny_path: str, settings, answers, calls, said):
    async def body() -> None:
        given = {name: value for name, value in settings.items() if name != "sees"}
        engine = QuickEngine(EngineConfig(model_path=tiny_path, **given, **SETTINGS))
        engine._sees = "sees" in settings
        engine.llm.answers |= answers
        with pytest.raises(RuntimeError, match=r"^pause\(\) comes before an update: "):
            await engine.receive_weights(8)
        await engine.pause()
        if said:
            with pytest.raises(RunStopped) as stopped:
                await engine.receive_weights(8)
            assert str(stopped.value) == said and engine._loop.is_paused
        else:
            await engine.receive_weights(8)
            assert not engine._loop.is_paused
        assert engine.llm.calls == calls
        await engine.close()

    asyncio.run(body())


@pytest.mark.parametrize("settings", [{}, LORA], ids=["whole", "adapter"])
def test_workers_are_told_what_an_update_brings_and_how_it_comes(tiny_path: str, settings):
    adapter = {"adapter": bool(settings)}
    chunk: Any = b"chunk"
    buckets: Any = [[("a", 1)]]

    async def body() -> None:
        engine = QuickEngine(EngineConfig(model_path=tiny_path, **settings, **SETTINGS))
        given, engine.llm.answers = engine.llm.given, {"feynrl_untouched": [[]], "feynrl_load_adapter": [[]]}
        await engine.join_broadcast(address="a", port=7, first_rank=2, members=5)
        joined = {"address": "a", "port": 7, "first_rank": 2, "members": 5, "timeout_s": 300.0}
        assert given == [("feynrl_join", {"init_info": joined})]
        for update, brought in (
            (lambda: engine.receive_weights(8), {}),
            (lambda: engine.load_weights(9, buckets), {"buckets": buckets}),
        ):
            given.clear()
            await engine.pause()
            await update()
            begun = [("feynrl_begin", adapter), ("feynrl_load_part", adapter | {"update_info": brought})]
            assert given[:2] == begun and not engine._loop.is_paused
        given.clear()
        await engine.pause()
        await engine.begin_chunks()
        for _ in range(2):
            await engine.load_chunk(chunk)
        part = ("feynrl_load_part", adapter | {"update_info": {"chunk": chunk}})
        assert given == [("feynrl_begin", adapter), part, part]
        await engine.receive_weights(10)
        assert [method for method, _ in given].count("feynrl_begin") == 1, "the chunks were the update"
        await engine.close()

    asyncio.run(body())


def test_an_engine_that_is_asleep_takes_no_weights(tiny_path: str):
    async def body() -> None:
        engine = QuickEngine(EngineConfig(model_path=tiny_path, sleep="offload", **SETTINGS))
        engine.llm.answers = {"feynrl_untouched": [[]]}
        await engine.sleep()
        for update in (engine.receive_weights(8), engine.load_weights(8, []), engine.begin_chunks()):
            with pytest.raises(RunStopped, match=r"^an engine was sent weights while it was asleep: wake its weights"):
                await update
        assert engine.llm.calls == []
        await engine.wake("weights")
        await engine.receive_weights(8)
        assert engine._loop.is_paused, "it samples when its cache is awake, too"
        await engine.close()

    asyncio.run(body())


def test_every_worker_records_a_trace_and_names_its_files(tiny_path: str):
    async def body() -> None:
        engine = QuickEngine(EngineConfig(model_path=tiny_path, **SETTINGS))
        engine.llm.answers = {"feynrl_stop_trace": [["a-0.json", "a-0.pickle"], ["a-1.json"]]}
        await engine.start_trace(trace=True, memory=False)
        assert await engine.stop_trace(Path("runs/a")) == ["a-0.json", "a-0.pickle", "a-1.json"]
        assert engine.llm.given == [
            ("feynrl_start_trace", {"trace": True, "memory": False}),
            ("feynrl_stop_trace", {"stem": "runs/a"}),
        ]
        await engine.close()

    asyncio.run(body())
