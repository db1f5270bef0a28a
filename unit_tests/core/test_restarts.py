"""Engines that die and come back: their groups are generated again, and only those."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import CallFailed, ProcessDied, UserError
from core.timing.clock import ActivityTimer
from core.types.samples import Group, Prompt
from driver.records.engine_timers import EngineTimers
from driver.rl.run import Run
from rollouts.scheduling.availability import ENGINE_GROUP, EngineAvailability
from rollouts.scheduling.buffer import ReplayBuffer, Schedule
from rollouts.scheduling.generation import Generation, GroupRequests
from tools.benchmarks.simulated_run import SimulatedEngines, Times, run_in_virtual_time

TIMES = Times(group=1.0, group_std=0.0, train=0.0, sync=0.0)
START_S = 10.0


class Mortal(SimulatedEngines):
    """Engines that can be killed; a call to one that is dead, or dies during it, raises as Ray's do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dead: set[int] = set()
        self.asked: list[tuple[int, int]] = []
        self.restarted: list[int] = []

    async def call_one(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked.append((rank, args[0]))
        answer = await super().call_one(rank, method, *args, **kwargs)
        if rank in self.dead:
            raise ProcessDied(f"engine {rank}: its process died", worker=(ENGINE_GROUP, rank))
        return answer

    async def restart(self, rank: int) -> None:
        await asyncio.sleep(START_S)
        self.restarted.append(rank)
        self.dead.discard(rank)


def generation_on(workers: Mortal, said: list[str], *, budget: int = 2) -> Generation:
    return Generation(
        workers,
        draw_prompt=lambda t: Prompt(id=str(t), messages=[]),
        accept_group=lambda g: True,
        buffer=ReplayBuffer(Schedule(steps=1, per_step=1)),
        group_size=1,
        timeout_s=9.0,
        engines=EngineAvailability(len(workers), restart=workers.restart, budget=budget, say=said.append),
    )


async def ask(generation: Generation, n: int) -> list[Group]:
    calls = (generation.generate_group(t, Prompt(id=str(t), messages=[]), 1) for t in range(n))
    return await asyncio.gather(*calls)


def test_only_groups_of_the_engine_that_died_are_asked_again_of_the_other() -> None:
    workers, said = Mortal(times=TIMES, engines=2, concurrent=9), list[str]()
    generation = generation_on(workers, said)

    async def body() -> None:
        workers.dead.add(1)
        groups = await ask(generation, 6)
        assert [g[0].prompt.id for g in groups] == [str(t) for t in range(6)]
        assert generation.engines.running() == [0], "the run went on without it"
        await asyncio.sleep(START_S)
        assert (generation.engines.serving(), generation.engines.needing_weights()) == ([0], [1])
        await ask(generation, 2)
        assert {rank for rank, _ in workers.asked[6:]} == {0}, "it has no weights yet"
        generation.engines.weights_arrived([1], 4)
        await ask(generation, 4)
        assert workers.asked[-2][0] != workers.asked[-1][0], "both work again"

    run_in_virtual_time(body())
    first, again = workers.asked[:6], workers.asked[6:9]
    assert sorted(t for rank, t in first if rank == 1) == sorted(t for _, t in again)
    assert workers.restarted == [1]
    assert said == [
        "engine 1: its process died; restarting it (1 of rollout.restarts=2)",
        "engine 1 is back, with the weights after 4 steps",
    ]


def test_the_groups_of_an_only_engine_wait_until_it_is_back_with_weights() -> None:
    workers = Mortal(times=TIMES, engines=1, concurrent=9)
    generation = generation_on(workers, [])

    async def body() -> list[Group]:
        workers.dead.add(0)
        asking = asyncio.create_task(ask(generation, 3))
        [rank] = await generation.engines.wait_for(generation.engines.needing_weights)
        assert rank == 0 and not asking.done()
        generation.engines.weights_arrived([0], 0)
        return await asking

    assert len(run_in_virtual_time(body())) == 3


def test_a_budget_that_is_used_up_ends_the_run_and_says_so() -> None:
    workers = Mortal(times=TIMES, engines=1, concurrent=9)

    async def dies_again(rank: int) -> None:
        await asyncio.sleep(START_S)
        raise ProcessDied(f"engine {rank} (build): its process died", worker=(ENGINE_GROUP, rank))

    workers.restart = dies_again  # type: ignore[method-assign]
    said: list[str] = []
    generation = generation_on(workers, said)

    async def body() -> None:
        workers.dead.add(0)
        await ask(generation, 3)

    with pytest.raises(ProcessDied, match=r"^engine 0 \(build\): .*; rollout.restarts=2 were used up before$"):
        run_in_virtual_time(body())
    assert len(said) == 2, "each restart is announced once, not once per group"


@pytest.mark.parametrize("error", [CallFailed("engine 0 (build) did not answer"), UserError("repair your engine")])
def test_a_restart_that_fails_ends_the_run_with_its_reason(error: Exception) -> None:
    async def fails(rank: int) -> None:
        raise error

    workers = Mortal(times=TIMES, engines=2, concurrent=9)
    workers.restart = fails  # type: ignore[method-assign]
    generation = generation_on(workers, [])

    async def body() -> None:
        workers.dead.add(0)
        await ask(generation, 4)
        await ask(generation, 4)

    with pytest.raises(type(error), match=str(error)[:9]):
        run_in_virtual_time(body())


def test_a_trainer_that_waits_for_the_same_engine_adds_no_traceback() -> None:
    workers, printed = Mortal(times=TIMES, engines=1, concurrent=9), list[str]()

    async def fails(rank: int) -> None:
        await asyncio.sleep(START_S)
        raise CallFailed("engine 0 did not answer")

    workers.restart = fails  # type: ignore[method-assign]
    workers.dead.add(0)

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context["message"]))
        generation = generation_on(workers, [])
        with pytest.raises(CallFailed, match="engine 0 did not answer"):
            async with generation.running_in_background():
                run: Any = SimpleNamespace(engines=generation.engines, steps_done=0)
                await Run.while_trainers_wait(run, asyncio.sleep(1e9))

    run_in_virtual_time(body())
    gc.collect(1)  # a task tells of its error when it goes; all of this is young
    assert printed == []


def test_trainers_that_wait_for_groups_leave_no_task_behind() -> None:
    async def body() -> None:
        run: Any = SimpleNamespace(engines=EngineAvailability(1), steps_done=0)
        assert await Run.while_trainers_wait(run, asyncio.sleep(1.0, "groups")) == "groups"
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(body())


def test_trainers_that_stop_waiting_give_up_the_work_of_the_engines() -> None:
    """Such as an evaluation, whose judges would go on to cost money while the run ends."""
    ended: list[str] = []

    async def sample() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("samples")

    async def body() -> None:
        run: Any = SimpleNamespace(engines=EngineAvailability(1), steps_done=0)
        waiting = asyncio.create_task(Run.while_trainers_wait(run, sample()))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.sleep(1.0)
        assert waiting.cancelled() and ended == ["samples"]

    run_in_virtual_time(body())


@pytest.mark.parametrize("worker", [None, ("trainer", 0)])
def test_only_engines_are_restarted(worker: tuple[str, int] | None) -> None:
    async def body() -> None:
        engines = EngineAvailability(1, restart=Mortal(times=TIMES, engines=1, concurrent=1).restart, budget=3)
        with pytest.raises(ProcessDied, match="it was no engine"):
            engines.report_death(ProcessDied("it was no engine", worker=worker), [0])

    run_in_virtual_time(body())


def test_a_death_that_is_reported_late_restarts_nobody() -> None:
    async def body() -> None:
        said: list[str] = []
        workers = Mortal(times=TIMES, engines=1, concurrent=1)
        engines = EngineAvailability(1, restart=workers.restart, budget=3, say=said.append)
        death, deaths = ProcessDied("engine 0: died", worker=(ENGINE_GROUP, 0)), [0]
        engines.report_death(death, deaths)
        engines.report_death(death, [1])  # it is being restarted
        await engines.wait_for(engines.needing_weights)
        engines.weights_arrived([0], 1)
        engines.report_death(death, deaths)
        assert (engines.serving(), engines.n_restarts, len(said)) == ([0], 1, 2)

    run_in_virtual_time(body())


class Busy(Mortal):
    """Engines whose groups wait for places, with a call that takes longer than any deadline of calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.deadlines: list[float] = []
        self.blocked = set[int]()

    def attribute(self, name: str) -> Busy:
        return self

    async def call_one(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        if method is not ActivityTimer.read_seconds:
            return await super().call_one(rank, method, *args)
        await asyncio.sleep(1000 if rank in self.blocked else 0)
        return {}

    def with_deadline(self, timeout_s: float, *, key: str) -> Busy:
        self.deadlines.append(timeout_s)
        return self

    async def check_health(self, rank: int) -> tuple[bool, str]:
        return rank not in self.dead, f"engine {rank}: no sign of life"


@pytest.mark.parametrize("how", ["dead", "blocked"])
def test_a_group_that_waits_for_places_ends_only_with_the_engine(how: str) -> None:
    """After two deadlines of 9 s the engine is stuck; the other one takes the group, and needs 100 s."""
    workers = Busy(times=Times(group=100.0, group_std=0.0, train=0.0, sync=0.0), engines=2, concurrent=9)
    requests = GroupRequests(
        workers,
        timeout_s=9.0,
        engines=EngineAvailability(2, restart=workers.restart, budget=2),
        waits_for_places=True,
    )

    async def body() -> float:
        asyncio.get_running_loop().call_later(20, getattr(workers, how).add, 0)
        group = await requests.generate_group(7, Prompt(id="7", messages=[]), 1)
        assert group[0].prompt.id == "7"
        return asyncio.get_running_loop().time()

    waited = 9.0 if how == "blocked" else 0.0  # for the answer of its event loop
    assert run_in_virtual_time(body()) == pytest.approx(127.0 + waited)
    assert workers.asked == [(0, 7), (1, 7)] and requests.n_retries == (1 if how == "blocked" else 0)
    assert workers.deadlines == [math.inf]


class Timers:
    """Timers of engine processes, as the driver reads them."""

    def __init__(self, read: Callable[[], float]):
        self.read = read

    def __len__(self) -> int:
        return 1

    def attribute(self, name: str) -> Timers:
        return self

    async def call_one(self, rank: int, method: object) -> dict[str, float]:
        assert method is ActivityTimer.read_seconds
        if (seconds := self.read()) < 0:
            raise ProcessDied("engine 0: died", worker=(ENGINE_GROUP, 0))
        return {"generate": seconds}


def test_the_seconds_of_an_engine_add_up_over_its_processes() -> None:
    async def body() -> None:
        engines = EngineAvailability(1, restart=Mortal(times=TIMES, engines=1, concurrent=1).restart, budget=3)
        answers = [5.0, 7.0, -1.0, 2.0]
        timers = EngineTimers(Timers(lambda: answers.pop(0)), engines)  # type: ignore[arg-type]
        assert [(await timers.read())[0]["generate"] for _ in range(3)] == [5.0, 7.0, 7.0]
        assert (await timers.read())[0]["generate"] == 7.0 and len(answers) == 1, "one that restarts is not asked"
        await engines.wait_for(engines.needing_weights)
        assert (await timers.read())[0]["generate"] == 9.0

    run_in_virtual_time(body())
