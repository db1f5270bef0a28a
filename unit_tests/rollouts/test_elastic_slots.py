"""Slots of elastic engines: when they are filled, refused, left and filled again, and what ends the run."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import CallFailed, ProcessDied, RunStopped, UserError
from rollouts.scheduling.availability import ENGINE_GROUP, EngineState
from rollouts.scheduling.elastic_engines import Bounds, ElasticAvailability
from tools.benchmarks.simulated_run import run_in_virtual_time


def died(rank: int, said: str = "gone") -> ProcessDied:
    return ProcessDied(said, worker=(ENGINE_GROUP, rank))


def lists_of(engines: ElasticAvailability) -> tuple[list[int], ...]:
    """Ranks that serve, run, take weights, and need weights."""
    return [*engines.serving()], engines.running(), engines.taking_weights(), engines.needing_weights()


class Slots:
    """Slots whose machines are given one by one, and that note their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.places: asyncio.Queue[bool | Exception] = asyncio.Queue()
        """Whether the process before died on the place's machine."""
        self.built: list[Exception | None] = []

    async def find_place(self, rank: int) -> bool:
        found = await self.places.get()
        self.calls.append(("find", rank))
        if isinstance(found, Exception):
            raise found
        return found

    async def build(self, rank: int) -> None:
        self.calls.append(("build", rank))
        if self.built and (error := self.built.pop(0)) is not None:
            raise error

    async def release(self, rank: int) -> None:
        self.calls.append(("release", rank))


def elastic(slots: Slots, said: list[str], *, most: int = 2, budget: int = 0) -> ElasticAvailability:
    bounds = Bounds(least=1, most=most, few_s=60.0, leave_s=20.0)
    return ElasticAvailability(bounds, slots, budget=budget, say=said.append)


def test_a_slot_is_filled_when_a_place_is_free_and_after_each_death():
    said: list[str] = []

    async def body() -> None:
        slots = Slots()
        engines = elastic(slots, said, budget=2)
        assert (engines.ever_running(), engines.n_restarts, engines.can_restart) == ([0], 0, True)
        assert lists_of(engines) == ([0], [0], [0], []) and engines.states[1] is EngineState.RESTARTING
        engines.open_slots()
        await asyncio.sleep(1.0)
        assert slots.calls == []
        slots.places.put_nowait(False)
        assert [*await engines.wait_for(engines.needing_weights)] == [1] and slots.calls == [("find", 1), ("build", 1)]
        engines.weights_arrived([0, 1], 2)
        assert (engines.ever_running(), engines.deaths) == ([0, 1], (0, 0))
        slots.calls, slots.built = [], [died(1, "built badly"), None]
        engines.report_death(died(1, "it died"), engines.deaths)
        engines.report_death(died(1, "it died"), (0, 0))
        for place in (True, died(1, "started badly"), False):
            slots.places.put_nowait(place)
        assert [*await engines.wait_for(engines.needing_weights)] == [1]
        assert slots.calls == [("find", 1), ("build", 1), ("find", 1), ("find", 1), ("build", 1)]
        engines.weights_arrived([1], 3)
        assert (engines.deaths, engines.n_restarts, engines.ever_running()) == ((0, 3), 3, [0, 1])
        # the two deaths on living machines are all that the budget has
        engines.report_death(died(1, "the last"), engines.deaths)
        slots.places.put_nowait(True)
        told = "engine 1 died while its machine lives, and rollout.restarts=2 were used up before"
        with pytest.raises(ProcessDied) as raised:
            await engines.wait_for(list)
        assert (str(raised.value), raised.value.worker) == (told, (ENGINE_GROUP, 1))
        await engines.stop()

    run_in_virtual_time(body())
    again = "; its groups are generated again, and its slot waits for a place"
    assert said == [
        "engine 1 has joined, with the weights after 2 steps; 2 of 2 engines serve",
        *(f"{what}{again}" for what in ("it died", "built badly", "started badly")),
        "engine 1 is back, with the weights after 3 steps; 2 of 2 engines serve",
        f"the last{again}",
    ]


@pytest.mark.parametrize(("busy", "ends_at"), [(0, 0.0), (2, 7.0), (1, 20.0)])
def test_a_leaving_engine_ends_with_its_groups_or_at_its_deadline(busy, ends_at):
    said: list[str] = []

    async def body() -> None:
        slots = Slots()
        engines = elastic(slots, said)
        now = asyncio.get_running_loop().time
        groups = [engines.begin_group(0) for _ in range(busy)]
        engines.drain(0, "its machine is to go")
        engines.drain(0, "again")  # it leaves already
        engines.drain(1, "an empty slot")
        assert engines.states[0] is EngineState.LEAVING and lists_of(engines) == ([], [0], [], [])
        await asyncio.sleep(5.0)
        for group in groups[:1] if busy == 2 else []:
            engines.end_group(group)
        await asyncio.sleep(2.0)
        assert slots.calls == ([] if busy else [("release", 0)])
        for group in groups[1:]:
            engines.end_group(group)
        while not slots.calls:
            await asyncio.sleep(0.5)
        assert now() == pytest.approx(max(ends_at, 7.0), abs=0.6)
        slots.places.put_nowait(False)
        assert [*await engines.wait_for(engines.needing_weights)] == [0] and engines.process_of(0) == (0, 1)
        assert slots.calls == [("release", 0), ("find", 0), ("build", 0)] and engines.n_restarts == 0
        await engines.stop()

    run_in_virtual_time(body())
    when = f", when its {busy} groups are done" if busy else ""
    assert said == [f"engine 0 leaves{when}: its machine is to go"]


@pytest.mark.parametrize("dies_after", [0.0, 1.0])
def test_a_leaving_engine_that_dies_is_replaced_once(dies_after):
    """With 0, in the same turn of the event loop. Nothing waits for its groups any more."""

    async def body() -> None:
        slots = Slots()
        engines = elastic(slots, [], budget=1)
        engines.begin_group(0)
        engines.drain(0, "its machine is to go")
        if dies_after:
            await asyncio.sleep(dies_after)
        engines.report_death(died(0), engines.deaths)
        slots.places.put_nowait(False)
        assert [*await engines.wait_for(engines.needing_weights)] == [0]
        await asyncio.sleep(1.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await asyncio.sleep(29.0)
        assert slots.calls == [("find", 0), ("build", 0)] and engines.deaths == (1, 0)
        await engines.stop()

    run_in_virtual_time(body())


def test_a_run_with_too_few_engines_for_too_long_is_stopped():
    told = (
        "for 60 seconds (timeout_s) there were fewer engines than rollout.num_engines.min=1, at last 0: give the "
        "cluster machines, or lower it"
    )

    async def body(back_after: float) -> str:
        slots, said = Slots(), list[str]()
        engines = elastic(slots, said, budget=9)
        for _ in range(2):  # the seconds of the first time do not count towards the second
            engines.report_death(died(0), engines.deaths)
            await asyncio.sleep(back_after)
            slots.places.put_nowait(False)
            try:
                await engines.wait_for(engines.needing_weights)
            except RunStopped as stopped:
                assert asyncio.get_running_loop().time() == 61.0
                return str(stopped)
            engines.weights_arrived([0], 1)
        await asyncio.sleep(100.0)
        await engines.wait_for(engines.serving)
        await engines.stop()
        return ""

    assert run_in_virtual_time(body(59.0)) == "" and run_in_virtual_time(body(61.0)) == told


def test_the_watch_drains_at_its_interval_and_its_error_ends_the_run():
    asked: list[float] = []

    async def find_leaving() -> dict[int, str]:
        asked.append(asyncio.get_running_loop().time())
        if len(asked) == 3:
            raise CallFailed("the cluster is gone")
        return {}

    async def body() -> None:
        engines = elastic(Slots(), [])
        engines.start_watch(find_leaving, every_s=4.0)
        with pytest.raises(CallFailed, match=r"^the cluster is gone$"):
            await engines.wait_for(list)
        await engines.stop()

    run_in_virtual_time(body())
    assert asked == [0.0, 4.0, 8.0]


def test_an_engine_that_is_refused_leaves_the_slot_empty():
    said: list[str] = []

    async def body() -> None:
        slots = Slots()
        slots.built = [UserError("another torch"), None]
        engines = elastic(slots, said, most=3)
        engines.open_slots()
        for _ in range(2):
            slots.places.put_nowait(False)
        assert [*await engines.wait_for(engines.needing_weights)] == [2]
        await asyncio.sleep(9.0)
        assert sorted(slots.calls) == [("build", 1), ("build", 2), ("find", 1), ("find", 2), ("release", 1)]
        assert engines.states[1] is EngineState.RESTARTING
        await engines.stop()

    run_in_virtual_time(body())
    assert said == ["engine 1 cannot join, and its slot stays empty: another torch"]


def test_whoever_waits_is_told_when_there_were_too_few_engines_too_long():
    """The seconds count from the second lack on: the first ended in time."""

    async def body() -> None:
        slots = Slots()
        engines = elastic(slots, [])
        engines.report_death(died(0), engines.deaths)
        await asyncio.sleep(50.0)
        slots.places.put_nowait(False)
        engines.weights_arrived(await engines.wait_for(engines.needing_weights), 1)
        await asyncio.sleep(100.0)
        engines.report_death(died(0), engines.deaths)
        with pytest.raises(RunStopped, match=r"^for 60 seconds \(timeout_s\) there were fewer engines"):
            await engines.wait_for(engines.serving)
        assert asyncio.get_running_loop().time() == 50.0 + 100.0 + 60.0
        await engines.stop()

    run_in_virtual_time(body())


def test_nothing_goes_on_after_the_end_of_a_run():
    asked: list[float] = []

    async def find_leaving() -> dict[int, str]:
        asked.append(asyncio.get_running_loop().time())
        return {}

    async def body() -> None:
        engines = elastic(Slots(), [])
        engines.start_watch(find_leaving, every_s=4.0)
        engines.report_death(died(0), engines.deaths)
        await asyncio.sleep(5.0)
        await engines.stop()
        await asyncio.sleep(100.0)
        assert asked == [0.0, 4.0] and asyncio.all_tasks() == {asyncio.current_task()}
        assert [*await engines.wait_for(lambda: [7])] == [7], "nobody gives up for want of engines"

    run_in_virtual_time(body())


def test_an_engine_leaves_after_a_sync_also_if_the_sync_failed():
    async def body() -> None:
        slots = Slots()
        engines = elastic(slots, [])
        with pytest.raises(CallFailed), engines.syncing():
            engines.drain(0, "its machine is to go")
            await asyncio.sleep(30.0)
            assert slots.calls == []
            raise CallFailed("the weights did not arrive")
        await asyncio.sleep(1.0)
        assert slots.calls == [("release", 0)]
        await engines.stop()

    run_in_virtual_time(body())


def test_a_leaving_engine_waits_for_its_own_groups_alone():
    """The engine 1 has a group until 7 s, the engine 0 for ever."""

    async def body() -> None:
        slots = Slots()
        bounds = Bounds(least=2, most=3, few_s=60.0, leave_s=20.0)
        engines = ElasticAvailability(bounds, slots, say=lambda _: None)
        engines.begin_group(0)
        group = engines.begin_group(1)
        engines.drain(1, "its machine is to go")
        await asyncio.sleep(7.0)
        assert slots.calls == []
        engines.end_group(group)
        await asyncio.sleep(1.0)
        assert slots.calls == [("release", 1)] and engines.groups == [1, 0, 0]
        await engines.stop()

    run_in_virtual_time(body())
