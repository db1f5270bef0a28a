"""Requests of groups to engines that are slow, blocked or dead, and the background generation of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from configs.judge_schema import JudgeBudgetConfig
from core import judge_metrics
from core.errors import ProcessDied, RunStopped
from core.timing.clock import ActivityTimer
from core.timing.deadlines import GROUP_TIMEOUT_GRACE_S
from core.types.samples import Group, Prompt
from rollouts.scheduling.availability import ENGINE_GROUP, EngineAvailability
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer, Schedule
from rollouts.scheduling.generation import Generation, GroupRequests
from rollouts.scheduling.judge_turns import JudgeTurns
from rollouts.worker import RolloutWorker
from tools.benchmarks.simulated_run import answer, run_in_virtual_time

PROMPT = Prompt(id="the row", messages=[])
SLOW = 1e6
WAIT = 9.0 + GROUP_TIMEOUT_GRACE_S


class Engines:
    """Engines that answer each call after the seconds of their script; an error or None is raised or returned."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.calls, self.deadlines = scripts, list[Any](), list[Any]()
        self.dead = dict[int, str]()
        self.asked_health: list[int] = []

    def __len__(self) -> int:
        return len(self.scripts)

    async def call_one(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        self.calls.append((rank, method.__name__, *args))
        if method is RolloutWorker.forget_group:
            return None
        step = self.scripts[rank].pop(0)
        if isinstance(step, Exception):
            raise step
        seconds, found = step if isinstance(step, tuple) else (step, [answer(args[0], rank)])
        await asyncio.sleep(seconds)
        return found

    async def check_health(self, rank: int) -> tuple[bool, str]:
        self.asked_health.append(rank)
        return rank not in self.dead, self.dead.get(rank, "")

    def with_deadline(self, timeout_s: float, *, key: str) -> Engines:
        self.deadlines.append((timeout_s, key))
        return self

    def attribute(self, name: str) -> Any:
        assert name == "timer"
        return self.Timers()

    class Timers:
        async def call_one(self, rank: int, method: Callable[..., Any]) -> dict[str, float]:
            assert method is ActivityTimer.read_seconds
            return {}


def ask(
    engines: Engines, *, restart: bool = False, busy: Sequence[int] = (), **more: Any
) -> tuple[GroupRequests, Any, float]:
    """Ask for the group of ticket 7. Return the requests, the group's engine or the error, and the seconds.

    busy: engines that play other groups.
    """

    async def restarted(rank: int) -> None:
        await asyncio.sleep(1.0)
        engines.dead.pop(rank, None)

    async def body() -> tuple[GroupRequests, Any, float]:
        availability = EngineAvailability(
            len(engines), restart=restarted if restart else None, budget=2, say=lambda _: None
        )
        requests = GroupRequests(engines, timeout_s=9.0, engines=availability, **more)  # type: ignore[arg-type]
        for rank in busy:
            availability.begin_group(rank)
        try:
            sample, *_ = await requests.generate_group(7, PROMPT, 3)
            found = int(sample.versions[-1])
        except (ProcessDied, RunStopped) as error:
            found = f"{type(error).__name__}: {error}"
        await availability.stop()
        return requests, found, asyncio.get_running_loop().time()

    return run_in_virtual_time(body())


TWICE = (
    "RunStopped: the group of ticket 7 was requested twice, from engine {} first, and did not finish within "
    "rollout.timeout_s=9 seconds: raise that if completions may take so long"
)


@pytest.mark.parametrize(
    ("scripts", "dead", "restart", "found", "asked", "health", "seconds", "retries"),
    [
        ([[1.0], []], {}, False, 0, [0], [], 1.0, 0),
        ([[WAIT - 0.5], []], {}, False, 0, [0], [], WAIT - 0.5, 0),
        ([[SLOW], [2.0]], {}, False, 1, [0, 1], [], WAIT + 2.0, 1),
        ([[(3.0, None)], [2.0]], {}, False, 1, [0, 1], [], 5.0, 1),
        # an engine that may start again is looked at first, and so is the only one
        ([[SLOW], [2.0]], {}, True, 1, [0, 1], [0], WAIT + 2.0, 1),
        ([[SLOW, 2.0]], {}, False, 0, [0, 0], [0], WAIT + 2.0, 1),
        ([[SLOW], [SLOW]], {}, False, TWICE.format(0), [0, 1], [0, 1], 2 * WAIT, 1),
        ([[SLOW, SLOW]], {}, False, TWICE.format(0), [0, 0], [0, 0, 0], 2 * WAIT, 1),
        ([[SLOW], [SLOW]], {1: "no pulse"}, False, "ProcessDied: no pulse", [0, 1], [0, 1], 2 * WAIT, 1),
        ([[SLOW]], {0: "no pulse"}, False, "ProcessDied: no pulse", [0], [0], WAIT, 1),
        # the engine 0 has died: the group is asked of the other, where it has two attempts again
        ([[SLOW], [2.0]], {0: "no pulse"}, True, 1, [0, 1], [0], WAIT + 2.0, 1),
        ([[SLOW], [SLOW, 2.0]], {0: "no pulse"}, True, 1, [0, 1, 1], [0, 1], 2 * WAIT + 2.0, 2),
        ([[ProcessDied("gone", worker=(ENGINE_GROUP, 0))], [2.0]], {}, True, 1, [0, 1], [], 2.0, 0),
        ([[ProcessDied("gone", worker=(ENGINE_GROUP, 0))], [2.0]], {}, False, "ProcessDied: gone", [0], [], 0.0, 0),
    ],
)
def test_a_group_is_asked_of_another_engine_and_given_up_after_two(
    scripts, dead, restart, found, asked, health, seconds, retries
):
    engines = Engines(*[[*script] for script in scripts])
    engines.dead = dict(dead)
    requests, got, took = ask(engines, restart=restart)
    assert engines.calls == [(rank, "generate_group", 7, PROMPT, 3) for rank in asked]
    assert (got, engines.asked_health, requests.n_retries) == (found, health, retries)
    assert took == pytest.approx(seconds) and engines.deadlines == []
    if not restart and isinstance(found, int):
        # what timed out stays counted, what came does not
        assert requests.engines.groups == [asked[:-1].count(rank) for rank in range(len(engines))]


def test_a_group_that_waits_for_places_has_no_deadline_by_itself():
    engines = Engines([100.0], [1.0])
    requests, got, took = ask(engines, waits_for_places=True)
    assert (got, took, engines.asked_health) == (0, 100.0, [0] * 11) and engines.deadlines == [(float("inf"), "")]
    assert requests.n_retries == 0
    engines = Engines([SLOW], [1.0])
    engines.dead[0] = "no pulse"
    assert ask(engines, waits_for_places=True)[1:] == ("ProcessDied: no pulse", 9.0)
    assert ask(Engines([(3.0, None)], [1.0]), waits_for_places=True)[1:] == (1, 4.0)


def test_a_second_attempt_is_made_elsewhere_although_there_is_more_to_do():
    requests, *found = ask(Engines([SLOW, 1.0], [2.0]), busy=(1, 1, 1))
    assert (found, requests.engines.groups) == ([1, WAIT + 2.0], [1, 3])


def test_a_dead_engine_is_told_of_when_its_group_has_stopped():
    """An engine in this process closes the environments of a group that is cancelled."""

    class Tidy(Engines):
        async def call_one(self, rank, method, *args):
            try:
                return await super().call_one(rank, method, *args)
            finally:
                await asyncio.sleep(4.0)

    engines = Tidy([SLOW])
    engines.dead[0] = "no pulse"
    assert ask(engines, waits_for_places=True)[1:] == ("ProcessDied: no pulse", 9.0 + 4.0)


class Devices:
    def __init__(self) -> None:
        self.notes: list[str] = []

    async def begin_judging(self) -> None:
        self.notes.append("judge")

    async def end_judging(self) -> None:
        self.notes.append("sleeps")

    async def resume_engines(self) -> None:
        self.notes.append("engines")


def test_with_turns_a_group_is_played_then_rewarded_by_the_same_engine():
    group = [answer(7, 5)]
    cases: list[tuple[list[list[Any]], Any, list[Any], list[str]]] = [
        (
            [[(20.0, True), (30.0, group)], []],
            (5, 50.0),
            [(0, "play_group", 7, PROMPT, 3), (0, "reward_group", 7)],
            ["engines", "judge", "sleeps"],
        ),
        (
            [[(20.0, False)], [(1.0, True), (1.0, group)]],
            (5, 22.0),
            [(0, "play_group", 7, PROMPT, 3), (1, "play_group", 7, PROMPT, 3), (1, "reward_group", 7)],
            ["engines", "engines", "judge", "sleeps"],
        ),
        (
            [[(1.0, True), RunStopped("no judge")], []],
            ("RunStopped: no judge", 1.0),
            [(0, "play_group", 7, PROMPT, 3), (0, "reward_group", 7), (0, "forget_group", 7)],
            ["engines", "judge", "sleeps"],
        ),
    ]
    for scripts, found, calls, notes in cases:
        engines, devices = Engines(*scripts), Devices()
        _, *got = ask(engines, turns=JudgeTurns(devices), waits_for_places=True)
        assert (tuple(got), engines.calls, devices.notes) == (found, calls, notes)
        assert engines.deadlines == [(float("inf"), "")]


@pytest.mark.parametrize(("script", "died_at"), [([SLOW], 10.0), ([(2.0, True), SLOW], 12.0)])
def test_an_engine_that_dies_as_it_plays_or_rewards_is_looked_at(script, died_at):
    """The first engine takes too long for the group."""
    engines = Engines([(1.0, False)], script)
    engines.dead[1] = "no pulse"
    *_, found, took = ask(engines, turns=JudgeTurns(Devices()), waits_for_places=True)
    assert (found, took, engines.asked_health) == ("ProcessDied: no pulse", died_at, [1])


def test_calls_of_a_judge_are_counted_with_each_group():
    found = replace(answer(7, 0), counts={"judge/calls": 2.0})
    requests, *_ = ask(Engines([(1.0, [found, found])]))
    assert requests.judges.measure()[judge_metrics.JUDGE_SPENT_CALLS] == 4.0


def generation(workers: Engines, schedule: Schedule, done: list[FinishedGroup], **more: Any) -> Generation:
    def draw(ticket: int) -> Prompt:
        return Prompt(id=f"row {ticket}", messages=[])

    def accept(group: Group) -> bool:
        return group[0].prompt.id != "1"

    return Generation(
        workers,  # type: ignore[arg-type]
        draw_prompt=draw,
        accept_group=accept,
        buffer=ReplayBuffer(schedule),
        group_size=4,
        timeout_s=9.0,
        on_finished=done.append,
        **more,
    )


def test_a_generation_asks_for_groups_by_its_settings():
    engines, turns, budget = Engines([], []), JudgeTurns(Devices()), JudgeBudgetConfig(calls=3)
    availability, schedule = EngineAvailability(2), Schedule(steps=1, per_step=1)
    making = generation(engines, schedule, [], engines=availability, turns=turns, judge_budget=budget)
    assert (making.engines, making.turns, making.timeout_s, making.group_size) == (availability, turns, 9.0, 4)
    making.judges.count([replace(answer(7, 0), counts={"judge/calls": 3.0})])
    assert making.judges.describe_excess().startswith("reward.judge_budget.calls=3 is used up")
    assert engines.deadlines == [(float("inf"), "")]
    for waits, deadlines in ((False, []), (True, [(float("inf"), "")])):
        engines = Engines([])
        generation(engines, schedule, [], waits_for_places=waits)
        assert engines.deadlines == deadlines


def test_a_run_generates_groups_until_it_is_held_or_ends():
    engines, done = Engines([1.0, 2.0, 3.0, *[1.0] * 9, SLOW, SLOW]), list[FinishedGroup]()

    async def body() -> None:
        now = asyncio.get_running_loop().time
        making = generation(engines, Schedule(steps=3, per_step=2, max_staleness=1), done)
        async with making.running_in_background():
            groups, drawn = await making.buffer.next_step_groups(0)
            assert [g[0].prompt.id for g in groups] == ["0", "2"] and [d.ticket for d in drawn] == [0, 1, 2]
            assert now() == 3.0
            told = [(one.ticket, one.group[0].prompt.id, one.accepted, one.seconds) for one in done]
            assert told[:3] == [(0, "0", True, 1.0), (3, "3", True, 1.0), (1, "1", False, 2.0)]
            assert engines.calls[1] == (0, "generate_group", 1, Prompt(id="row 1", messages=[]), 4)
            asked = len(engines.calls)
            async with making.held():
                assert all(task.done() for task in making.tasks) and len(done) == asked
                making.buffer.set_version(1)
                await asyncio.sleep(50.0)
                assert len(engines.calls) == asked, "no group begins while it is held"
            await making.buffer.next_step_groups(1)
            engines.scripts[0][:] = [SLOW] * 9
            making.buffer.set_version(2)
            await asyncio.sleep(0.5)
            assert len(engines.calls) > asked
            ended_at = now()
        assert now() == ended_at and not making.tasks, "what nobody needs is cancelled"

    run_in_virtual_time(body())


def test_work_beside_the_generation_ends_with_it_or_ends_the_run():
    ended: list[str] = []

    async def add(a: int, b: int) -> int:
        await asyncio.sleep(1.0)
        return a + b

    async def wait_long() -> None:
        try:
            await asyncio.sleep(SLOW)
        finally:
            ended.append("long")

    async def fail() -> None:
        await asyncio.sleep(2.0)
        raise RunStopped("the disk is full")

    async def body() -> None:
        schedule = Schedule(steps=1, per_step=1)
        making = generation(Engines([SLOW]), schedule, [])
        work = add(1, 2)
        with pytest.raises(AssertionError, match=r"^nothing runs in the background"):
            making.start_beside(work)
        async with making.running_in_background():
            making.start_beside(wait_long())
            assert await making.start_beside(work) == 3
        assert ended == ["long"] and asyncio.get_running_loop().time() == 1.0
        making = generation(Engines([SLOW]), schedule, [])
        with pytest.raises(RunStopped, match=r"^the disk is full$"):
            async with making.running_in_background():
                making.start_beside(fail())
                await asyncio.sleep(SLOW)
        assert asyncio.get_running_loop().time() == 3.0

    run_in_virtual_time(body())
