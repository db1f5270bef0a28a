"""Engines join a running job and leave it: no ticket is lost or used twice, and no bound of staleness is broken."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import main_rl
from configs.schema import RLConfig
from core.cluster.elastic_workers import ElasticWorkers
from core.errors import ProcessDied, RunStopped, UserError
from driver.load_recipe import load_recipe
from driver.rl.setup import watch_engines
from rollouts.scheduling.availability import ENGINE_GROUP, EngineAvailability, EngineState
from rollouts.scheduling.elastic_engines import Bounds, ElasticAvailability
from tools.benchmarks.simulated_run import SimulatedRun, Times, run_in_virtual_time
from unit_tests.helpers.simulated_machines import Machines, elastic
from unit_tests.helpers.simulated_runs import Choosy, a_schedule

TIMES = Times(group=1.0, group_std=0.0, train=1.0, sync=0.1)


async def shake(run: SimulatedRun, machines: Machines, availability: ElasticAvailability, draw: random.Random) -> None:
    """Let machines come and go, with and without notice, and processes die on machines that stay."""
    next_machine = len(machines)
    while True:
        await asyncio.sleep(draw.expovariate(0.5))
        there = [*machines.machines]
        match draw.choice(["come", "come", "drain", "kill", "crash"]):
            case "come":
                machines.add_machine(next_machine)
                next_machine += 1
            case "drain" if there:
                availability.drain(draw.choice(there), "its machine is to go")
            case "kill" | "crash" as how if there:
                machines.kill(draw.choice(there), machine_lives=how == "crash")
            case _:
                pass


def play(seed: int) -> list[str]:
    draw = random.Random(seed)
    schedule, said = a_schedule(draw), list[str]()
    spread = draw.choice([0.0, 1.0, 8.0])
    times = Times(group=1.0, group_std=spread, train=draw.choice([0.0, 1.0, 5.0]), sync=draw.random(), seed=seed)
    least = draw.randint(1, 2)

    async def body() -> Choosy:
        machines = Machines(times, least=least, most=least + draw.randint(1, 4))
        run = Choosy(schedule, machines, times, timeout_s=10_000.0)
        run.leaves_out, run.draw = draw.choice([0.0, 0.3]), draw
        availability = run.generation.engines = elastic(machines, least=least, said=said)
        availability.open_slots()
        shaking = asyncio.create_task(shake(run, machines, availability, random.Random(seed)))
        try:
            await main_rl.train(run)
        finally:
            shaking.cancel()
            await availability.stop()
        return run

    run = run_in_virtual_time(body())
    told = f"seed {seed}, {schedule}"
    assert max(run.ages) <= schedule.max_staleness and min(run.ages) >= 0, told
    kept = [d.ticket for d in run.drawn if d.accepted]
    trained = [[int(g[0].prompt.id) for g in groups] for groups in run.trained]
    windows = [schedule.window(step) for step in range(schedule.steps)]
    assert trained == [kept[w.start : w.stop] for w in windows], told
    assert [d.ticket for d in run.drawn] == list(range(len(run.drawn))), f"a ticket is lost or used twice: {told}"
    return said


def test_whoever_comes_and_goes_no_ticket_is_lost_and_the_bound_holds():
    said = [line for seed in range(120) for line in play(seed)]
    for what in ("has joined, with the weights", "is back, with the weights", " leaves", "its process died"):
        assert sum(what in line for line in said) > 20, f"{what}: the engines did not come and go"


@pytest.mark.verify
def test_nor_with_thousands_of_other_comings_and_goings():
    for seed in range(1000, 5000):
        play(seed)


async def begin(machines: Machines, said: list[str], *, least: int = 1, **settings: Any) -> tuple[SimulatedRun, Any]:
    """A run whose first engines have weights, and nothing is generated yet."""
    run = SimulatedRun(SCHEDULE, machines, machines.times, timeout_s=100.0)
    availability = run.generation.engines = elastic(machines, least=least, said=said, **settings)
    availability.open_slots()
    await run.sync_weights(0)
    return run, availability


SCHEDULE = a_schedule(random.Random(0))


def test_a_newcomer_serves_when_it_has_weights_and_not_before():
    async def body() -> None:
        said: list[str] = []
        machines = Machines(TIMES, least=1, most=3)
        run, engines = await begin(machines, said)
        assert (engines.serving(), engines.running(), engines.ever_running()) == ([0], [0], [0])
        machines.add_machine(7)
        await asyncio.sleep(3.0)  # it is built
        assert (engines.serving(), engines.needing_weights()) == ([0], [1])
        groups = [run.generation.generate_group(t, run.generation.draw_prompt(t), 1) for t in range(3)]
        await asyncio.gather(*groups)
        assert {rank for rank, _ in machines.asked} == {0}
        await run.sync_weights(1)
        assert (engines.serving(), engines.ever_running(), machines.versions) == ([0, 1], [0, 1], {0: 1, 1: 1})
        assert said == ["engine 1 has joined, with the weights after 1 steps; 2 of 3 engines serve"]
        await engines.stop()

    run_in_virtual_time(body())


def test_an_engine_that_leaves_gets_no_more_groups_and_keeps_its_own():
    async def body() -> None:
        said: list[str] = []
        machines = Machines(replace(TIMES, group=50.0), least=2, most=3)
        run, engines = await begin(machines, said, least=2)

        async def ask(ticket: int) -> list[Any]:
            return await run.generation.generate_group(ticket, run.generation.draw_prompt(ticket), 1)

        first = [asyncio.create_task(ask(t)) for t in range(4)]
        await asyncio.sleep(1.0)
        engines.drain(1, "its machine is to go")
        more = [asyncio.create_task(ask(t)) for t in range(4, 8)]
        await run.sync_weights(3)
        assert (engines.serving(), machines.versions) == ([0], {0: 3, 1: 0}), "it takes no part in the sync"
        done = [group[0].versions[-1] for group in await asyncio.gather(*first)]
        assert sorted(done) == [0] * 4, "its groups began with the weights of step 0"
        await asyncio.sleep(0.1)
        assert [*machines.machines] == [0] and engines.states[1] is EngineState.RESTARTING
        await asyncio.gather(*more)
        assert [rank for rank, ticket in machines.asked if ticket >= 4] == [0] * 4
        assert said == ["engine 1 leaves, when its 2 groups are done: its machine is to go"]
        assert engines.n_restarts == 0, "to leave is no death"
        await engines.stop()

    run_in_virtual_time(body())


def test_engines_on_machines_that_are_to_go_are_found_by_the_watch():
    async def body() -> None:
        said: list[str] = []
        machines = Machines(TIMES, least=2, most=3)
        _, engines = await begin(machines, said, least=2)
        leaving: dict[int, str] = {}

        async def find_leaving() -> dict[int, str]:
            return leaving

        engines.start_watch(find_leaving, every_s=2.0)
        await asyncio.sleep(5.0)
        assert engines.serving() == [0, 1] and said == []
        leaving[1] = "its machine is to go"
        await asyncio.sleep(3.0)
        assert engines.serving() == [0] and said == ["engine 1 leaves: its machine is to go"], "once, not every 2 s"
        await engines.stop()

    run_in_virtual_time(body())


def test_an_engine_leaves_between_two_syncs():
    async def body() -> None:
        machines = Machines(replace(TIMES, sync=5.0), least=2, most=3)
        run, engines = await begin(machines, [], least=2)
        syncing = asyncio.create_task(run.sync_weights(1))
        await asyncio.sleep(1.0)
        engines.drain(1, "its machine is to go")
        await asyncio.sleep(1.0)
        assert [*machines.machines] == [0, 1]
        await syncing
        await asyncio.sleep(0.1)
        assert [*machines.machines] == [0] and machines.versions == {0: 1}
        await engines.stop()

    run_in_virtual_time(body())


@pytest.mark.parametrize("sync", [0.1, 5.0])  # with the last, the new engine is there before the sync ends
def test_an_engine_that_takes_the_place_of_one_that_died_leaving_stays(sync):
    async def body() -> None:
        said: list[str] = []
        machines = Machines(replace(TIMES, group=50.0, sync=sync), least=2, most=2)
        run, engines = await begin(machines, said, least=2)
        groups = [asyncio.create_task(run.generation.generate_group(0, run.generation.draw_prompt(0), 1))]
        groups += [asyncio.create_task(run.generation.generate_group(1, run.generation.draw_prompt(1), 1))]
        await asyncio.sleep(1.0)
        engines.drain(1, "its machine is to go")
        syncing = asyncio.create_task(run.sync_weights(1))
        await asyncio.sleep(0.01)
        machines.add_machine(7)
        machines.kill(1)
        await syncing
        await asyncio.gather(*groups)
        assert machines.machines == {0: 0, 1: 7} and engines.needing_weights() == [1], said
        await run.sync_weights(2)
        assert engines.serving() == [0, 1] and machines.versions == {0: 2, 1: 2}
        await engines.stop()

    run_in_virtual_time(body())


def test_weights_do_not_count_for_a_process_that_came_later():
    async def body() -> None:
        machines = Machines(TIMES, least=2, most=2)
        _, engines = await begin(machines, [], least=2)
        deaths = engines.deaths
        machines.kill(1, machine_lives=True)
        engines.report_death(ProcessDied("engine 1: its process died", worker=(ENGINE_GROUP, 1)), deaths)
        await engines.wait_for(engines.needing_weights)
        engines.weights_arrived([0, 1], 1, deaths)
        assert engines.serving() == [0]
        engines.weights_arrived([1], 1, engines.deaths)
        assert engines.serving() == [0, 1]
        await engines.stop()

    run_in_virtual_time(body())


@pytest.mark.parametrize("budget", [0, 2])
def test_an_engine_that_dies_on_a_machine_that_lives_counts(budget):
    """Not one that dies with its machine: that is what engines that come and go are for."""

    async def body() -> None:
        machines = Machines(TIMES, least=1, most=2)
        _, engines = await begin(machines, [], budget=budget)
        for machine in range(10, 15):
            machines.add_machine(machine)
            await engines.wait_for(engines.needing_weights)
            engines.weights_arrived([1], 0)
            machines.kill(1)
            engines.report_death(ProcessDied("engine 1: died", worker=(ENGINE_GROUP, 1)), engines.deaths)
        machines.fails_to_start = lambda rank: True
        machines.add_machine(20)
        await engines.wait_for(engines.needing_weights)

    said = rf"engine 1 died while its machine lives, and rollout.restarts={budget} were used up before"
    with pytest.raises(ProcessDied, match=said):
        run_in_virtual_time(body())


def test_a_long_lack_of_engines_ends_a_run_and_a_refused_machine_does_not():
    said: list[str] = []

    class Refused(Machines):
        async def build(self, rank: int) -> None:
            raise UserError("its machine has another version of torch")

    async def body() -> None:
        machines = Refused(TIMES, least=2, most=3)
        run, engines = await begin(machines, said, least=2, few_s=60.0)
        machines.add_machine(9)
        await asyncio.sleep(1.0)
        assert said == ["engine 2 cannot join, and its slot stays empty: its machine has another version of torch"]
        engines.drain(1, "its machine is to go")
        await asyncio.sleep(59.0)
        assert len(await run.generation.generate_group(0, run.generation.draw_prompt(0), 1)) == 1, "it goes on"
        await asyncio.sleep(2.0)
        await run.sync_weights(1)

    with pytest.raises(RunStopped, match=r"for 60 seconds \(timeout_s\) there were fewer .*min=2, at last 1: give"):
        run_in_virtual_time(body())


def test_the_engine_with_the_fewest_groups_is_asked():
    async def body() -> None:
        engines = EngineAvailability(3, restart=lambda rank: asyncio.sleep(60.0), budget=1)
        first, second, _ = (engines.begin_group(rank) for rank in (0, 1, 1))
        assert engines.find_least_busy() == 2 and engines.find_least_busy(besides=2) == 0
        engines.begin_group(2)
        assert engines.find_least_busy() == 0, "the lowest of several"
        engines.end_group(second)
        assert engines.groups == [1, 1, 1]
        engines.report_death(ProcessDied("gone", worker=(ENGINE_GROUP, 0)), engines.deaths)
        assert engines.find_least_busy() == 1
        engines.end_group(first)
        assert engines.groups == [0, 1, 1], "of a process that is gone"
        await engines.stop()

    asyncio.run(body())
    assert EngineAvailability(1).find_least_busy(besides=0) == 0, "there is no other"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rollout.num_engines": {"min": 3, "max": 3}},
            r"rollout.num_engines.max: 3 must be above min: write a plain number",
        ),
        ({"rollout.num_engines": {"min": 0, "max": 3}}, r"rollout.num_engines.min=0 is not valid"),
        ({"rollout.num_engines": {"min": 1}}, r"rollout.num_engines.max is missing"),
        ({"rollout.num_engines": {"min": 1, "max": 2, "most": 3}}, r"rollout.num_engines.most is not a known key"),
        ({"rollout.num_engines": 0}, r"rollout.num_engines: 0 is not valid: at least one engine must be there"),
        ({"rollout.num_engines": "many"}, r"rollout.num_engines='many' is not valid"),
        ({"rollout.num_engines": {"min": 1, "max": 2}, "backend": "local"}, "backend: local is one process"),
    ],
)
def test_a_range_of_engines_that_cannot_be_is_refused(recipe, changes, says):
    with pytest.raises(UserError, match=says):
        load_recipe(RLConfig, recipe({"backend": "ray"} | changes), [])


class Joining(ElasticWorkers[Any]):
    """One engine, and empty slots for which there is no place; its machine is to go at the third question."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, str]] = []

    def note(self, what: str) -> None:
        self.notes.append((asyncio.get_running_loop().time(), what))

    async def find_place(self, rank: int) -> bool:
        self.note(f"a place for {rank}")
        return await asyncio.get_running_loop().create_future()

    async def release(self, rank: int) -> None:
        self.note(f"{rank} is released")

    async def find_leaving(self) -> dict[int, str]:
        self.note("who leaves")
        return {0: "its machine is to go"} if len(self.notes) == 5 else {}


def test_a_run_with_elastic_engines_lets_them_join_and_leave(recipe):
    changes = {"backend": "ray", "rollout.engine": "vllm", "rollout.num_engines": {"min": 1, "max": 3}}
    cfg = load_recipe(RLConfig, recipe(changes | {"timeout_s": 70.0, "rollout.timeout_s": 40.0}), []).cfg
    said: list[str] = []
    context: Any = SimpleNamespace(console=SimpleNamespace(say=said.append))
    engines = Joining()

    async def body() -> ElasticAvailability:
        start = asyncio.get_running_loop().time()
        found = watch_engines(cfg, engines, context)
        assert isinstance(found, ElasticAvailability) and context.availability is found
        assert [*found.serving()] == [0]
        await asyncio.sleep(11.0)
        assert [*found.serving()] == []
        await found.stop()
        engines.notes = [(time - start, what) for time, what in engines.notes]
        return found

    found = run_in_virtual_time(body())
    assert found.bounds == Bounds(least=1, most=3, few_s=70.0, leave_s=45.0)
    places = [(0.0, f"a place for {rank}") for rank in (1, 2)]
    asked = [(5.0 * n, "who leaves") for n in range(3)]
    assert engines.notes == [*places, *asked, (10.0, "0 is released"), (10.0, "a place for 0")]
    assert said[0] == "engine 0 leaves: its machine is to go"
