"""States of engines that die, start again and wait for weights: every list after every event, and all sentences."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from core.errors import CallFailed, ProcessDied, RunStopped
from rollouts.scheduling.availability import (
    ENGINE_GROUP,
    EngineAvailability,
    list_running,
    spend_restart,
)
from tools.benchmarks.simulated_run import run_in_virtual_time
from unit_tests.helpers.sentences import tell


def died(rank: int, said: str = "gone") -> ProcessDied:
    return ProcessDied(said, worker=(ENGINE_GROUP, rank))


async def start(rank: int) -> None:
    await asyncio.sleep(10.0)


def lists_of(engines: EngineAvailability) -> tuple[list[int], ...]:
    """Ranks that serve, run, take weights, and need weights."""
    return [*engines.serving()], engines.running(), engines.taking_weights(), engines.needing_weights()


def test_an_engine_dies_starts_waits_for_weights_and_serves():
    said: list[str] = []

    async def body() -> None:
        engines = EngineAvailability(3, restart=start, budget=2, say=said.append)
        assert lists_of(engines) == ([0, 1, 2], [0, 1, 2], [0, 1, 2], []) and engines.can_restart
        kept = engines.deaths
        busy = engines.begin_group(1)
        assert (busy, engines.begin_group(2), engines.groups) == ((1, 0), (2, 0), [0, 1, 1])
        engines.report_death(died(1), kept)
        engines.report_death(died(1), kept)  # of another group
        assert (kept, engines.deaths, engines.n_restarts) == ((0, 0, 0), (0, 1, 0), 1)
        assert (engines.groups, engines.process_of(1), engines.process_of(2)) == ([0, 0, 1], (1, 1), (2, 0))
        engines.end_group(busy)
        engines.end_group((2, 0))
        assert engines.groups == [0, 0, 0], "a group of the dead process is not counted off the new one"
        assert lists_of(engines) == ([0, 2], [0, 2], [0, 2], [])
        engines.weights_arrived([0, 1, 2], 1)  # a sync in which the dead engine has no part
        assert [*await engines.wait_for(engines.needing_weights)] == [1]
        assert lists_of(engines) == ([0, 2], [0, 1, 2], [0, 1, 2], [1]) and engines.ever_running() == [0, 1, 2]
        engines.weights_arrived([0, 1, 2], 4, kept)  # sent before the process began
        assert engines.needing_weights() == [1]
        engines.weights_arrived([1], None)
        assert lists_of(engines) == ([0, 1, 2], [0, 1, 2], [0, 1, 2], [])
        engines.report_death(died(0, "engine 0 died"), engines.deaths)
        [rank] = await engines.wait_for(engines.needing_weights)
        engines.weights_arrived([rank, 2], 7)
        assert engines.deaths == (1, 1, 0)
        assert tell(lambda: engines.report_death(died(2, "the third"), engines.deaths), ProcessDied) == (
            "the third; rollout.restarts=2 were used up before"
        )

    run_in_virtual_time(body())
    assert said == [
        "gone; restarting it (1 of rollout.restarts=2)",
        "engine 1 is back",
        "engine 0 died; restarting it (2 of rollout.restarts=2)",
        "engine 0 is back, with the weights after 7 steps",
    ]


@pytest.mark.parametrize(
    ("used", "budget", "said", "told"),
    [
        (0, 0, "", "gone"),
        (2, 0, "", "gone"),
        (0, 1, "gone; restarting it (1 of rollout.restarts=1)", ""),
        (2, 3, "gone; restarting it (3 of rollout.restarts=3)", ""),
        (3, 3, "", "gone; rollout.restarts=3 were used up before"),
        (4, 3, "", "gone; rollout.restarts=3 were used up before"),
    ],
)
def test_a_restart_is_told_until_the_last_is_used(used, budget, said, told):
    if said:
        assert spend_restart(died(5), used=used, budget=budget) == said
        return
    with pytest.raises(ProcessDied) as raised:
        spend_restart(died(5), used=used, budget=budget)
    assert (str(raised.value), raised.value.worker) == (told, (ENGINE_GROUP, 5))


def test_a_death_that_restarts_nothing_is_raised_as_it_is():
    async def body() -> None:
        fixed, spent = EngineAvailability(2, budget=3), EngineAvailability(2, restart=start, budget=0)
        deaths = {
            "no restart": (fixed, died(1)),
            "no budget": (spent, died(1)),
            "no worker": (EngineAvailability(2, restart=start, budget=1), ProcessDied("who?")),
            "a trainer": (EngineAvailability(2, restart=start, budget=1), ProcessDied("x", worker=("trainer", 1))),
        }
        for engines, death in deaths.values():
            with pytest.raises(ProcessDied) as raised:
                engines.report_death(death, engines.deaths)
            assert raised.value is death and engines.deaths == (0, 0) and engines.serving() == [0, 1]
        assert not fixed.can_restart and not spent.can_restart

    asyncio.run(body())


def test_the_seconds_away_are_those_from_each_death_to_the_weights(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rollouts.scheduling.availability.time.perf_counter", lambda: now[0])

    async def body() -> None:
        engines = EngineAvailability(2, restart=lambda _: asyncio.sleep(0), budget=9, say=lambda _: None)
        now[0] = 103.0
        assert engines.away_s(0) == 0.0
        away: list[float] = []
        for lost_at, back_at in ((110.0, 117.0), (130.0, 132.0)):
            now[0] = lost_at
            engines.report_death(died(1), engines.deaths)
            now[0] += 1.0
            away.append(engines.away_s(1))
            await engines.wait_for(engines.needing_weights)
            now[0] += 0.5
            away.append(engines.away_s(1))
            now[0] = back_at
            engines.weights_arrived([0, 1], 1)
            now[0] += 5.0
            away.append(engines.away_s(1))
        assert away == [1.0, 1.5, 7.0, 8.0, 8.5, 9.0] and engines.away_s(0) == 0.0

    asyncio.run(body())


def test_an_engine_that_dies_in_its_start_costs_another_restart():
    said: list[str] = []
    fails = [died(0, "again"), died(0, "once more")]

    async def restart(rank: int) -> None:
        await asyncio.sleep(1.0)
        if fails:
            raise fails.pop(0)

    async def body() -> None:
        engines = EngineAvailability(1, restart=restart, budget=3, say=said.append)
        engines.report_death(died(0), engines.deaths)
        waiting = asyncio.create_task(engines.wait_for(engines.needing_weights))
        assert [*await waiting] == [0] and asyncio.get_running_loop().time() == 3.0
        assert (engines.deaths, engines.n_restarts) == ((3,), 3)

    run_in_virtual_time(body())
    assert said == [
        f"{what}; restarting it ({n} of rollout.restarts=3)" for n, what in enumerate(("gone", "again", "once more"), 1)
    ]


def fail_later(error: Exception) -> Callable[[int], Awaitable[None]]:
    async def restart(rank: int) -> None:
        await asyncio.sleep(1.0)
        raise error

    return restart


def test_a_failed_start_is_told_to_all_that_wait_and_ask():
    async def body() -> None:
        engines = EngineAvailability(2, restart=fail_later(CallFailed("no start")), budget=3, say=lambda _: None)
        engines.report_death(died(1), engines.deaths)
        assert [*await engines.wait_for(engines.serving)] == [0]
        waiting = [asyncio.create_task(engines.wait_for(engines.needing_weights)) for _ in range(2)]
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(one) for one in told] == ["no start"] * 2
        with pytest.raises(CallFailed, match=r"^no start$"):
            await engines.wait_for(engines.serving)  # although one serves
        assert tell(lambda: engines.report_death(died(0), engines.deaths), CallFailed) == "no start"
        assert engines.deaths == (0, 1)

    run_in_virtual_time(body())


def test_work_beside_the_engines_may_end_the_run_and_ends_with_it():
    ended: list[str] = []

    async def body() -> None:
        engines = EngineAvailability(1)

        async def watch(fail: Callable[[Exception], None]) -> None:
            try:
                await asyncio.sleep(5.0)
                fail(RunStopped("the disk is full"))
                await asyncio.sleep(1e9)
            finally:
                ended.append("watch")

        engines.run_beside(watch)
        with pytest.raises(RunStopped, match=r"^the disk is full$"):
            await engines.wait_for(list)
        assert asyncio.get_running_loop().time() == 5.0 and ended == []
        await engines.stop()
        assert ended == ["watch"] and asyncio.get_running_loop().time() == 5.0

    run_in_virtual_time(body())


def test_without_a_record_all_engines_run():
    async def body() -> None:
        engines = EngineAvailability(3, restart=start, budget=1, say=lambda _: None)
        engines.report_death(died(0), engines.deaths)
        assert [*list_running(3, engines)] == [1, 2] and [*list_running(3, None)] == [0, 1, 2]
        await engines.stop()

    asyncio.run(body())


def test_the_least_busy_engine_is_another_one_where_there_is_another():
    engines = EngineAvailability(4)
    for rank, n in enumerate((2, 1, 1, 3)):
        for _ in range(n):
            engines.begin_group(rank)
    assert [engines.find_least_busy(besides) for besides in (None, 0, 1, 2, 3)] == [1, 1, 2, 1, 1]
    assert EngineAvailability(1).find_least_busy(0) == 0


@pytest.mark.parametrize(("budget", "can"), [(0, False), (1, True), (2, True)])
def test_an_engine_can_restart_while_the_recipe_allows_one(budget, can):
    assert EngineAvailability(1, restart=start, budget=budget).can_restart is can


@pytest.mark.parametrize("is_back", [False, True])
def test_a_death_that_was_handled_is_not_handled_again(is_back):
    """Told by a group that began before it; or, while the engine starts, by one that looks after its first attempt."""
    said: list[str] = []

    async def body() -> None:
        engines = EngineAvailability(2, restart=start, budget=5, say=said.append)
        kept = engines.deaths
        engines.report_death(died(1), kept)
        if is_back:
            await engines.wait_for(engines.needing_weights)
            engines.weights_arrived([1], 3)
            engines.report_death(died(1, "late"), kept)
            assert engines.serving() == [0, 1]
        else:
            engines.report_death(died(1, "late"), kept)
            engines.report_death(died(1, "again"), engines.deaths)
            assert engines.serving() == [0]
        assert engines.deaths == (0, 1)
        await engines.stop()

    run_in_virtual_time(body())
    assert [line.partition(";")[0] for line in said if not line.startswith("engine 1 is back")] == ["gone"]


def test_whoever_waits_for_an_engine_goes_on_with_each_change():
    """A group waits until an engine serves, an evaluation until none does."""

    async def body() -> None:
        now = asyncio.get_running_loop().time
        engines = EngineAvailability(2, restart=start, budget=5, say=lambda _: None)
        engines.report_death(died(1), engines.deaths)
        await engines.wait_for(engines.needing_weights)
        none = asyncio.create_task(engines.wait_for(lambda: [] if engines.serving() else engines.needing_weights()))
        await asyncio.sleep(2.0)
        assert not none.done()
        engines.report_death(died(0), engines.deaths)
        assert [*await none] == [1] and now() == 12.0, "not only when the other has started"
        serves = asyncio.create_task(engines.wait_for(engines.serving))
        await asyncio.sleep(3.0)
        engines.weights_arrived([1], 4)
        assert [*await serves] == [1] and now() == 15.0
        await engines.stop()

    run_in_virtual_time(body())
