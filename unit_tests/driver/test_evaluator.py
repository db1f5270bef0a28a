"""Evaluations beside training, in simulated time: what they cost, and of which version they are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import main_rl
from configs.schema import RLConfig
from core.timing.clock import Clock
from core.types.samples import Prompt
from driver.evaluation.evaluator import EvalResult, Evaluator
from driver.load_recipe import load_recipe
from driver.rl.evaluation import RunEvaluation
from rollouts.scheduling.availability import EngineAvailability, EngineState
from rollouts.scheduling.buffer import Schedule
from tools.benchmarks.simulated_run import SimulatedEngines, SimulatedRun, Times, answer, run_in_virtual_time

CFG: Any = SimpleNamespace(
    eval_samples=1, eval_pass_reward=1.0, reward=SimpleNamespace(max_failed_fraction=0.0), eval_reward=None
)
TIMES = Times(group=8.0, group_std=0.0, train=10.0, sync=0.5)


class Evaluating(SimulatedRun):
    """Evaluates after every other step, `how`: beside, in place or never."""

    how = "never"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held_out = Evaluator(CFG, [Prompt(id=str(i), messages=[]) for i in range(3)], self.generation)
        self.found: list[EvalResult | None] = []

    async def evaluate_if_due(self, done: int) -> dict[str, float]:
        if done % 2 == 0 and self.how == "beside":
            self.held_out.begin(f"after step {done}")
        elif done % 2 == 0 and self.how == "in place":
            self.found.append(self.held_out.measure(await self.held_out.sample(), f"after step {done}"))
        return {}

    async def sync_weights_if_due(self, done: int, learnt: dict[str, float]) -> dict[str, float]:
        if self.held_out.pending is not None:
            self.found.append(await self.held_out.end())
        return await super().sync_weights_if_due(done, learnt)


def seconds_of(how: str) -> float:
    async def body() -> Evaluating:
        schedule = Schedule(steps=9, per_step=4, max_staleness=1)
        run = Evaluating(schedule, SimulatedEngines(times=TIMES, engines=2, concurrent=64), TIMES)
        run.how = how
        await main_rl.train(run)
        return run

    run = run_in_virtual_time(body())
    if how != "never":
        assert [found and (found.when, found.version) for found in run.found] == [
            (f"after step {n}", n) for n in (2, 4, 6, 8)
        ]
    return run.ends[-1]


def test_beside_training_an_evaluation_costs_no_time_and_is_of_one_version():
    alone = seconds_of("never")
    assert seconds_of("beside") == pytest.approx(alone)
    assert seconds_of("in place") > alone + 3 * TIMES.group


@pytest.mark.parametrize(
    ("read", "version"),
    [
        ({"checkpoint": {"every": 3, "best": "eval/reward/mean"}}, 3),
        ({"stop_when": {"metric": "eval/reward/mean", "above": 0.9}}, 3),
        ({"checkpoint": {"every": 3, "best": "reward/mean"}}, 0),
    ],
)
def test_an_evaluation_that_decides_is_of_the_newest_weights(recipe, sums, read, version):
    """Between two weight syncs the engines have older weights than a checkpoint saves."""
    changes = {"max_staleness": 3, "weight_sync.every": 4, "eval_every": 3, "data.eval": str(sums / "eval.parquet")}
    cfg = load_recipe(RLConfig, recipe(changes | read), []).cfg
    engines = SimulatedEngines(times=TIMES, engines=1, concurrent=8)
    run = SimulatedRun(Schedule(steps=9, per_step=1, max_staleness=3, sync_every=4), engines, TIMES)
    told: dict[str, Any] = {"is_over": False, "checkpoint_is_due": lambda done: True, "facts": {}}
    context: Any = SimpleNamespace(clock=Clock(), console=SimpleNamespace(say=lambda _: None), **told)
    evaluator = Evaluator(cfg, [Prompt(id="0", messages=[])], run.generation)

    async def body() -> dict[str, float]:
        await run.sync_weights(0)
        run.steps_done = 3
        return await RunEvaluation(evaluator, context, cfg.eval_every).evaluate_if_due(run, 3)

    assert run_in_virtual_time(body())["eval/version"] == version


def held_out_of(engines: SimulatedEngines, **settings: Any) -> Evaluator:
    run = SimulatedRun(Schedule(steps=1, per_step=1), engines, TIMES)
    if settings:
        run.generation.engines = EngineAvailability(1, **settings)
    return Evaluator(CFG, [Prompt(id="0", messages=[])], run.generation)


def test_an_engine_that_was_restarted_leaves_the_evaluation_out():
    """It waits for weights, and the next ones are of another version."""

    async def body() -> tuple[EvalResult | None, bool]:
        held_out = held_out_of(SimulatedEngines(times=TIMES, engines=1, concurrent=1), restart=None, budget=1)
        held_out.generation.engines._set_state(0, EngineState.NEEDS_WEIGHTS)
        pending = held_out.pending = asyncio.create_task(held_out.sample())
        found = await held_out.end()
        await asyncio.wait([pending])
        return found, pending.cancelled()

    assert run_in_virtual_time(body()) == (None, True)


def test_answers_of_two_versions_are_no_measurement():
    held_out = held_out_of(SimulatedEngines(times=TIMES, engines=1, concurrent=1))
    assert held_out.measure([[answer(0, 1)], [answer(1, 2)]], "then") is None
    found = held_out.measure([[answer(0, 2)], [answer(1, 2)]], "then")
    assert found is not None and found.version == 2 and found.metrics["reward/mean"] == 0.0


def test_held_out_samples_that_all_failed_end_no_run():
    said: list[str] = []
    console = SimpleNamespace(say=said.append)
    context: Any = SimpleNamespace(facts={}, clock=Clock(), console=console, log_evaluation=lambda *_: None)

    async def body() -> None:
        held_out = held_out_of(SimulatedEngines(times=TIMES, engines=1, concurrent=1))
        held_out.cfg = SimpleNamespace(
            eval_pass_reward=1.0, reward=SimpleNamespace(max_failed_fraction=1.0), eval_reward=None
        )
        failed = replace(answer(0, 2), reward=None, failure="it broke")
        held_out.when, held_out.pending = "after step 2", asyncio.create_task(asyncio.sleep(1, [[failed]]))
        await RunEvaluation(held_out, context, 1).end_pending()

    run_in_virtual_time(body())
    assert said == ["after step 2: no sample has a reward over 1 prompts"]


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, [False, True, False, True, False, False]),
        ({"steps": 5}, [False, True, False, False, False, False]),  # the line of step 5 is the last
        ({"max_staleness": 0}, [False] * 6),
        ({"eval_every": 1}, [False] * 6),
        ({"stop_when": {"metric": "reward/mean", "above": 0.9}}, [False] * 6),
        ({"checkpoint": {"every": 2, "best": "eval/reward/mean"}}, [False] * 6),
        ({"checkpoint": {"every": 2, "best": "reward/mean"}}, [False, True, False, True, False, False]),
        ({"weight_sync.every": 2, "eval_every": 3}, [False, False, True, False, False, False]),
    ],
)
def test_where_something_hangs_on_the_number_the_trainers_wait_for_it(recipe, sums, changes, may):
    overlap = {"max_staleness": 1, "steps": 6, "eval_every": 2, "data.eval": str(sums / "eval.parquet")}
    cfg = load_recipe(RLConfig, recipe(overlap | changes), []).cfg
    held_out = Evaluator(
        cfg, [], SimulatedRun(Schedule(steps=1, per_step=1), SimulatedEngines(TIMES, 1, 1), TIMES).generation
    )
    assert [held_out.may_run_beside(n + 1) for n in range(6)] == may


def test_nothing_goes_on_beside_an_evaluation_that_has_ended():
    """Each leaves no task behind, or a run would have one more for every evaluation."""

    async def body() -> tuple[EvalResult | None, set[asyncio.Task[Any]]]:
        engines = SimulatedEngines(times=TIMES, engines=1, concurrent=1)
        run = SimulatedRun(Schedule(steps=1, per_step=1), engines, TIMES)
        held_out = Evaluator(CFG, [Prompt(id="0", messages=[])], run.generation)
        await run.sync_weights(0)
        held_out.when, held_out.pending = "after step 0", asyncio.create_task(held_out.sample())
        found = await held_out.end()
        await asyncio.sleep(0)
        return found, asyncio.all_tasks() - {asyncio.current_task()}

    found, left = run_in_virtual_time(body())
    assert found is not None and (found.when, found.version) == ("after step 0", 0) and left == set()
