"""The calls of runs around their training steps, in order, on parts that note what they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from algs.grpo import GRPO
from configs.judge_schema import JudgeConfig
from configs.schema import RLConfig, SLConfig
from core.cluster.ray_workers import Remote
from core.cluster.workers import Local
from core.errors import ProcessDied, RunStopped
from core.timing.clock import Clock
from driver.alg_state import state_to_json
from driver.checkpoint import RunState
from driver.evaluation.evaluator import EvalResult
from driver.load_recipe import load_recipe
from driver.rl.colocation import make_colocation, make_judge_turns, offload_after_start
from driver.rl.evaluation import RunEvaluation
from driver.rl.run import Run as RLRun
from driver.rl.setup import make_generation, prepare, start_workers, watch_engines
from driver.sl.run import Run as SLRun
from driver.start.trainers import build_trainer, plan_trainer
from rollouts.scheduling.availability import EngineAvailability
from rollouts.scheduling.buffer import FinishedGroup
from rollouts.scheduling.judge_turns import JudgeTurns
from rollouts.worker import RolloutWorker
from unit_tests.helpers.examples import sample_of, some_answers, some_groups

pytestmark = pytest.mark.usefixtures("one_thread")
Notes = list[tuple[Any, ...]]


def make_run(cls: type[Any], **parts: Any) -> Any:
    return cls(**dict.fromkeys(cls.__dataclass_fields__) | parts)


def noting(notes: Notes, name: str, answer: Any = None) -> Callable[..., Any]:
    """Return a function that notes its arguments and returns the answer."""

    def call(*given: Any, **keys: Any) -> Any:
        notes.append((name, *given, *keys.items()))
        return answer

    return call


def awaited(notes: Notes, name: str, answer: Any = None) -> Callable[..., Awaitable[Any]]:
    """Return a coroutine function that notes its arguments, and returns the answer or raises it."""

    async def call(*given: Any, **keys: Any) -> Any:
        notes.append((name, *given, *keys.items()))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return call


# RL ----------------------------------------------------------------------------------------------------------


def ending(notes: Notes, *, staleness: int, backend: str, is_colocated: bool, flushed: Any = None) -> Any:
    samples = SimpleNamespace(flush=awaited(notes, "flush", flushed))
    context = SimpleNamespace(
        folder=SimpleNamespace(samples=samples), save_model=awaited(notes, "save"), facts={"a": 1}
    )
    return make_run(
        RLRun,
        cfg=SimpleNamespace(max_staleness=staleness, backend=backend),
        **{"trainers": "trainers", "tokenizer": "tokenizer", "alg": "alg", "context": context},
        colocation=SimpleNamespace(give_to_trainers=awaited(notes, "turn")) if is_colocated else None,
        observers=SimpleNamespace(finish=awaited(notes, "finish")),
        time=SimpleNamespace(summarize=awaited(notes, "seconds", {"bottleneck": "b"})),
    )


def test_a_run_ends_with_its_samples_then_its_model_then_its_seconds():
    for staleness, backend, is_colocated, may_overlap in (
        (0, "ray", False, True),
        (1, "ray", False, False),
        (0, "local", False, False),
        (0, "ray", True, True),
    ):
        run = ending(notes := [], staleness=staleness, backend=backend, is_colocated=is_colocated)
        asyncio.run(run.save())
        assert notes == [
            ("flush",),
            *([("turn",)] if is_colocated else []),
            ("save", "trainers", "tokenizer", "alg"),
            ("finish",),
            ("seconds", ("may_overlap", may_overlap), ("is_colocated", is_colocated)),
        ]
        assert run.context.facts == {"a": 1, "bottleneck": "b"}


def test_lost_samples_stop_a_run_before_its_model_counts_as_saved():
    full = RunStopped("the disk is full")
    run = ending(notes := [], staleness=0, backend="ray", is_colocated=True, flushed=full)
    with pytest.raises(RunStopped, match="the disk is full"):
        asyncio.run(run.save())
    assert notes == [("flush",)]


def test_a_checkpoint_has_the_position_the_state_and_the_opponent(recipe):
    notes: Notes = []

    @asynccontextmanager
    async def held() -> AsyncIterator[None]:
        notes.append(("held",))
        yield
        notes.append(("released",))

    alg = GRPO()
    turns = SimpleNamespace(
        give_to_trainers=awaited(notes, "to trainers"), give_to_engines=awaited(notes, "to engines")
    )
    for snapshots, version, colocation in ((None, 0, None), (SimpleNamespace(version=7), 7, None), (None, 0, turns)):
        notes.clear()
        run = make_run(
            RLRun,
            **{"alg": alg, "trainers": "trainers", "tokenizer": "tokenizer", "settings": {"settings": {}}},
            **{"snapshots": snapshots, "colocation": colocation, "steps_done": 4},
            generation=SimpleNamespace(buffer=SimpleNamespace(get_state=lambda: {"ticket": 3}), held=held),
            context=SimpleNamespace(checkpoint_is_due=lambda n: n == 4, write_checkpoint=awaited(notes, "write")),
        )
        asyncio.run(run.checkpoint_if_due(2, {}))
        assert notes == []
        asyncio.run(run.checkpoint_if_due(3, {"m": 1.0}))
        state = RunState(
            **{"steps_done": 4, "metrics": {"m": 1.0}, "position": {"ticket": 3}, "recipe": {"settings": {}}},
            **{"alg_state": state_to_json(alg), "opponent_version": version},
        )
        written = ("write", "trainers", "tokenizer", state)
        around = [("held",), ("to trainers",), written, ("to engines", 4), ("released",)]
        assert notes == (around if colocation else [written])


def test_a_step_is_logged_with_what_its_engines_and_judges_did():
    notes: Notes = []
    samples = SimpleNamespace(write=awaited(notes, "write"))
    judges = SimpleNamespace(measure=lambda: {"judge/spent_calls": 5.0}, describe_excess=lambda: "used up")
    context = SimpleNamespace(
        **{"clock": Clock(), "folder": SimpleNamespace(samples=samples), "log": noting(notes, "log")},
        **{"show_samples": noting(notes, "show"), "early_stop": SimpleNamespace(end=noting(notes, "end"))},
    )
    engines = SimpleNamespace(n_restarts=3, serving=lambda: [0, 1])
    told_of = {"reward": 1.0, "turns": ((1, 3),)}
    equal = [[sample_of([1, 2, 3], [False, True, True], turn_rewards=(float(i),), **told_of) for i in range(2)]]
    for credit, zero_std in (("episode", 1.0), ("turn", 0.0)):
        notes.clear()
        run = make_run(
            RLRun,
            **{"alg": GRPO(credit=credit), "context": context, "prompts": SimpleNamespace(mixed=())},
            cfg=SimpleNamespace(show_samples=4, record_tokens=False),
            generation=SimpleNamespace(n_retries=2, judges=judges, engines=engines),
            time=SimpleNamespace(start_lap=awaited(notes, "lap", {"time/engines/idle_fraction": 0.5})),
        )
        asyncio.run(run.log(6, equal, {"train/loss": 0.25, "rollout/samples": 9.0}))
        [show, lap, end, (_, step, measured), write] = notes
        assert (show, lap, end) == (("show", 6, equal, ("every", 4)), ("lap",), ("end", "used up"))
        assert write == ("write", 6, equal, None) and step == 6
        told = {"rollout/zero_std_groups": zero_std, "train/loss": 0.25, "time/engines/idle_fraction": 0.5}
        told |= {"rollout/group_retries": 2.0, "rollout/engine_restarts": 3.0, "rollout/engines": 2.0}
        told |= {"judge/spent_calls": 5.0, "rollout/samples": 9.0, "reward/mean": 1.0}
        assert {name: measured[name] for name in told} == told


def syncing(notes: Notes, *, is_due: bool, **parts: Any) -> Any:
    schedule = SimpleNamespace(needs_sync=noting(notes, "asked", is_due))
    buffer = SimpleNamespace(schedule=schedule, version=5, set_version=noting(notes, "version"))
    engines = parts.pop("engines", None)
    generation = SimpleNamespace(buffer=buffer, engines=engines)
    return make_run(RLRun, generation=generation, context=SimpleNamespace(clock=Clock()), **parts)


def test_weights_are_sent_when_due_and_after_a_pending_evaluation():
    notes: Notes = []
    turns = SimpleNamespace(give_to_engines=awaited(notes, "send", {"sync/bytes": 1.0}))
    evaluation = SimpleNamespace(end_pending=awaited(notes, "evaluated"))
    asked = ("asked", 7, ("version", 5), ("kl", 0.5))
    for is_due, pending, calls in (
        (False, evaluation, []),
        (True, None, [("send", 7), ("version", 7)]),
        (True, evaluation, [("evaluated",), ("send", 7), ("version", 7)]),
    ):
        notes.clear()
        run = syncing(notes, is_due=is_due, colocation=turns, evaluation=pending)
        proof = asyncio.run(run.sync_weights_if_due(7, {"train/mismatch/kl": 0.5}))
        assert (notes, proof) == ([asked, *calls], {"sync/bytes": 1.0} if is_due else {})
    notes.clear()
    asyncio.run(syncing(notes, is_due=False).sync_weights_if_due(7, {}))
    assert notes == [("asked", 7, ("version", 5), ("kl", None))]


def test_a_sync_in_which_an_engine_dies_is_made_again_with_the_others():
    notes: Notes = []
    death, left = ProcessDied("engine 1: its process died", worker=("engine", 1)), iter([[0, 1], [0]])

    async def publish(version: int, engines: list[int]) -> dict[str, float]:
        notes.append(("publish", version, engines))
        if 1 in engines:
            raise death
        return {"sync/probe_gap": 0.0}

    async def wait_for(listed: Callable[[], Any]) -> list[int]:
        notes.append(("wait", listed()))
        return next(left)

    @contextmanager
    def during() -> Iterator[None]:
        yield

    engines = SimpleNamespace(
        **{"deaths": {1: 0}, "syncing": during, "wait_for": wait_for, "taking_weights": lambda: "those that take"},
        **{"report_death": noting(notes, "died"), "weights_arrived": noting(notes, "arrived")},
    )
    snapshots = SimpleNamespace(renew=awaited(notes, "renew"), send=awaited(notes, "opponent"))
    weights = SimpleNamespace(publish_weights=publish)
    run = syncing(notes, is_due=True, engines=engines, snapshots=snapshots, weights=weights)
    assert asyncio.run(run.sync_weights(3)) == {"sync/probe_gap": 0.0}
    assert notes == [
        ("renew", 3),
        *(("wait", "those that take"), ("publish", 3, [0, 1]), ("died", death, {1: 0})),
        *(("wait", "those that take"), ("publish", 3, [0]), ("opponent", [0]), ("arrived", [0], 3, {1: 0})),
        ("version", 3),
    ]


class Measures:
    """Evaluator that finds what it is told to, in order."""

    def __init__(
        self, notes: Notes, found: list[dict[str, float] | None], *, beside: bool = False, decides: bool = False
    ):
        self.notes, self.found, self.decides, self.pending, self.when = notes, found, decides, None, "after step 1"
        self.prompts, self.may_run_beside = [1, 2, 3], lambda steps_done: beside
        self.generation = SimpleNamespace(buffer=SimpleNamespace(version=4))
        self.begin, self.sample = noting(notes, "begin"), awaited(notes, "sample", "groups")

    def measure(self, groups: str, when: str) -> EvalResult | None:
        self.notes.append(("measure", groups, when))
        metrics = self.found.pop(0)
        return None if metrics is None else EvalResult(when=when, metrics={"version": 4.0, **metrics})

    async def end(self) -> EvalResult | None:
        self.pending = None
        return self.measure("pending", self.when)


def evaluation_of(notes: Notes, evaluator: Measures, *, every: int = 2, **told: Any) -> tuple[RunEvaluation, Any]:
    context: Any = SimpleNamespace(
        **{"clock": Clock(), "facts": {}, "console": SimpleNamespace(say=noting(notes, "say"))},
        **{"is_over": False, "checkpoint_is_due": lambda n: False, "log_evaluation": noting(notes, "log")} | told,
    )

    async def wait(work: Awaitable[Any]) -> Any:
        return await work

    run = SimpleNamespace(steps_done=5, colocation=None, while_trainers_wait=wait)
    run.sync_weights = awaited(notes, "sync", {"sync/bytes": 1.0})
    given: Any = evaluator
    return RunEvaluation(given, context, every), run


MEAN = {"eval/version": 4.0, "eval/reward/mean": 0.5}
MEASURED = [("sample",), ("measure", "groups", "after step 4")]
SAID = ("say", "after step 4: held-out reward 0.500 over 3 prompts")


def test_an_evaluation_is_made_when_due_in_place_or_beside():
    for beside, metrics, calls in ((True, {}, [("begin", "after step 4")]), (False, MEAN, [*MEASURED, SAID])):
        evaluation, run = evaluation_of(notes := [], Measures(notes, [{"reward/mean": 0.5}], beside=beside))
        found = [asyncio.run(evaluation.evaluate_if_due(run, n)) for n in (3, 4, 5)]
        assert (found, notes) == ([{}, metrics, {}], calls)
    assert evaluation.context.facts == {"after step 4": {"version": 4.0, "reward/mean": 0.5}}
    never, run = evaluation_of(notes := [], Measures(notes, []), every=0)
    assert asyncio.run(never.evaluate_if_due(run, 4)) == {} and notes == []


def test_a_pending_evaluation_ends_before_a_checkpoint():
    evaluator = Measures(notes := [], [{"reward/mean": 0.5}])
    evaluation, run = evaluation_of(notes, evaluator, checkpoint_is_due=lambda n: n == 3)
    asyncio.run(evaluation.evaluate_if_due(run, 3))
    assert notes == []
    evaluator.pending = "a task"
    asyncio.run(evaluation.evaluate_if_due(run, 3))
    said = ("say", "after step 1: held-out reward 0.500 over 3 prompts")
    assert notes == [("measure", "pending", "after step 1"), said, ("log", 4, MEAN)]
    evaluator.found, evaluator.pending = [None], "a task"
    notes.clear()
    asyncio.run(evaluation.end_pending())
    assert notes[1:] == [
        ("say", "the evaluation after step 1 is left out: an engine was restarted, and its weights are newer")
    ]


def test_the_same_weights_are_measured_once_and_newer_ones_are_sent_first():
    sent = {"sync/bytes": 1.0}
    for decides, is_over, proof in ((False, False, {}), (True, False, sent), (False, True, sent)):
        evaluator = Measures(notes := [], [{"reward/mean": 0.5}], decides=decides)
        evaluation, run = evaluation_of(notes, evaluator, is_over=is_over)
        sync = [("sync", 5)] if proof else []
        assert asyncio.run(evaluation.evaluate_if_due(run, 4)) == proof | MEAN
        assert notes == [*sync, *MEASURED, SAID]
        notes.clear()
        asyncio.run(evaluation.evaluate(run, "before"))
        again = "after step 5: held-out reward 0.500 over 3 prompts"
        assert notes == [*sync, ("say", again), ("log", 4, MEAN)], "nothing is sampled again"


def test_an_evaluation_of_two_versions_is_made_again_after_a_sync():
    evaluation, run = evaluation_of(notes := [], Measures(notes, [None, {}]))
    assert asyncio.run(evaluation.evaluate_if_due(run, 4)) == {"eval/version": 4.0}
    said = ("say", "after step 4: no sample has a reward over 3 prompts")
    assert notes == [*MEASURED, ("sync", 5), *MEASURED, said]
    for colocation, syncs in ((None, 2), ("turns", 0)):
        evaluation, run = evaluation_of(notes := [], Measures(notes, [None, None]))
        run.colocation = colocation
        with pytest.raises(RunStopped, match=r"^the engines \(rollout.engine\) said after a weight sync that they"):
            asyncio.run(evaluation.evaluate_if_due(run, 4))
        assert notes.count(("sync", 5)) == syncs


def test_workers_know_the_folders_of_their_run_and_of_the_resumed_one(recipe, tmp_path):
    prepared = prepare(load_recipe(RLConfig, recipe(), []))
    earlier: Any = SimpleNamespace(folder=Path("/runs/old/checkpoints/step_00001"))
    prepared = replace(prepared, checkpoint=earlier, loaded=replace(prepared.loaded, why_text="it is blind"))
    said: list[str] = []
    context: Any = SimpleNamespace(
        cluster=None, console=SimpleNamespace(say=said.append), folder=SimpleNamespace(path=tmp_path / "new")
    )

    async def start() -> Any:
        plan = plan_trainer(prepared.loaded.cfg, prepared.alg)
        _, engines, judges = await start_workers(prepared, context, plan)
        await engines.call_all(RolloutWorker.close)
        assert judges is None and context.engines is engines
        return engines

    run = asyncio.run(start()).worker.rewards.plan.run
    assert (run.folder, run.earlier_folder) == (str(tmp_path / "new"), "/runs/old")
    assert said == ["it is blind"]


def test_groups_are_generated_as_the_recipe_says_and_counted(recipe):
    changes = {"group_size": 3, "rollout.timeout_s": 70.0, "rollout.max_concurrency": 5, "max_staleness": 1}
    changes |= {"reward.judge_budget": {"calls": 9}}
    prepared = prepare(load_recipe(RLConfig, recipe(changes), []))
    notes: Notes = []
    context: Any = SimpleNamespace(
        console=SimpleNamespace(count_group=noting(notes, "count"), say=noting(notes, "say"))
    )
    workers: Any = SimpleNamespace(with_deadline=lambda timeout_s, key: (timeout_s, key))
    availability = EngineAvailability(1)
    turns: Any = "turns of a judge"
    made = make_generation(prepared, context, workers, availability, turns)
    assert (made.workers, made.engines, made.turns) == (workers, availability, turns)
    assert (made.group_size, made.timeout_s, made._groups) == (3, 70.0, (float("inf"), ""))
    assert made.judges.describe_excess() == ""
    made.judges.restore({"judge/spent_calls": 9.0})
    assert "reward.judge_budget.calls=9 is used up" in made.judges.describe_excess()
    assert [made.draw_prompt(n) for n in range(3)] == [prepared.prompts.draw(n) for n in range(3)]
    [group] = some_groups(1, 3)
    finished = FinishedGroup(ticket=0, group=group, accepted=made.accept_group(group), seconds=1.0)
    made.buffer.started = {0}
    made.buffer.add_group(finished)
    made.on_finished(finished)
    tokens = sum(s.n_sampled for s in group)
    assert notes == [("count", ("done", 1), ("wanted", 4), ("tokens", tokens))]


class Actors(Remote[Any]):
    """Engines in other processes, which no test calls."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    async def restart(self, rank: int) -> None:
        return


def test_engines_of_their_own_devices_are_started_again_and_others_are_not(recipe):
    cfg = load_recipe(RLConfig, recipe({"rollout.restarts": 2}), []).cfg
    shared = cfg.model_copy(update={"placement": "colocate"})
    none_left = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"restarts": 0})})
    in_process: Any = Local(SimpleNamespace())
    for given, engines, can_restart in (
        (cfg, Actors(2), True),
        (shared, Actors(2), False),
        (none_left, Actors(2), False),
        (cfg, in_process, False),
    ):
        context: Any = SimpleNamespace(console=SimpleNamespace(say=print))
        found = watch_engines(given, engines, context)
        assert context.availability is found and found.can_restart == can_restart
        assert [*found.serving()] == [*range(len(engines))]
    watched: list[Any] = []

    async def watch(fail: Any) -> None:
        watched.append(fail)

    async def begin() -> None:
        judges: Any = SimpleNamespace(watch=watch)
        found = watch_engines(cfg, Actors(1), context, judges)
        await asyncio.sleep(0)
        await found.stop()

    asyncio.run(begin())
    assert len(watched) == 1


def actors_of(name: str) -> Any:
    """Return workers in other processes, which no test calls."""
    slots: Any = SimpleNamespace(role=SimpleNamespace(name=name, n=2))
    return Remote(slots, lambda rank: None, 60.0, None)


def test_shared_devices_change_hands_within_the_deadline_of_a_sync(recipe):
    cfg = load_recipe(RLConfig, recipe({"placement": "colocate", "weight_sync.timeout_s": 20.0}), []).cfg
    judged = cfg.model_copy(update={"judge": JudgeConfig(model="m")})
    trainers, engines, clock = actors_of("trainer"), actors_of("engine"), Clock()
    weights: Any = "weights"
    judges: Any = "judges"
    made = make_colocation(cfg, trainers, engines, weights, clock, judges)
    # a worker reports before the driver gives up on it
    for actors, name, prefix in ((made.trainers, "trainer", "offloaded."), (made.engines, "engine", "")):
        found: Any = actors
        assert (found.name, found.prefix, found.timeout_s) == (name, prefix, 25.0)
        assert found.timeout_key == "weight_sync.timeout_s"
    assert made.sleepers is engines and (made.weights, made.clock) == (weights, clock)
    assert made.judges is None and make_colocation(judged, trainers, engines, weights, clock, judges).judges == judges
    here: Any = Local(SimpleNamespace(offloaded="away"))
    local = make_colocation(judged, here, here, weights, clock, judges)
    trainer: Any = local.trainers
    assert trainer.worker == "away" and local.engines is local.sleepers is here
    assert make_judge_turns(None) is make_judge_turns(made) is None
    assert isinstance(make_judge_turns(local), JudgeTurns)


def test_new_trainers_leave_the_device_whole_before_engines_measure_it():
    notes: Notes = []
    away = SimpleNamespace(
        **{"offload_states": noting(notes, "states"), "offload_weights": noting(notes, "weights")},
        name_devices=noting(notes, "devices", "0,1"),
    )
    trainers: Any = Local(SimpleNamespace(offloaded=away))
    assert asyncio.run(offload_after_start(trainers)) == ["0,1"]
    assert notes == [("states",), ("weights",), ("devices",)]


# Supervised --------------------------------------------------------------------------------------------------


class Measured(SLRun):
    """Run whose held-out rows have these metrics."""

    async def _measure(self, feed: Any) -> dict[str, float]:
        return feed.metrics


def test_held_out_rows_are_measured_when_due_and_told():
    notes: Notes = []
    loss, accuracy = {"eval/loss": 1.25}, {"eval/pair/accuracy": 0.5}
    for metrics, first_step, facts, when, said in (
        (loss, 0, {}, "before", "before: held-out loss 1.2500 over 3 rows"),
        (loss | accuracy, 4, {}, "after step 4", "after step 4: held-out loss 1.2500, accuracy 0.500 over 3 rows"),
        (loss, 0, {"steps_done": 9}, "before", "before: held-out loss 1.2500 over 3 rows"),
    ):
        notes.clear()
        context = SimpleNamespace(
            console=SimpleNamespace(say=noting(notes, "say")), log_evaluation=noting(notes, "log"), facts=dict(facts)
        )
        held_out = SimpleNamespace(metrics=metrics, all=lambda: [1, 2, 3])
        cfg = SimpleNamespace(eval_every=2)
        run = make_run(Measured, context=context, held_out=held_out, first_step=first_step, cfg=cfg)
        asyncio.run(run.evaluate("before"))
        assert notes == [("log", facts.get("steps_done", first_step), metrics), ("say", said)]
        assert context.facts == facts | {when: metrics}
        found = [asyncio.run(run.evaluate_if_due(step)) for step in range(4)]
        assert found == [{}, metrics, {}, metrics]
        for never in (make_run(Measured, held_out=None, cfg=cfg), replace(run, cfg=SimpleNamespace(eval_every=0))):
            assert asyncio.run(never.evaluate_if_due(1)) == {}
    notes.clear()
    asyncio.run(make_run(Measured, held_out=None).evaluate("before"))
    assert notes == []


def test_a_supervised_step_is_logged_with_its_rows_and_kept_with_its_state():
    notes: Notes = []
    context = SimpleNamespace(
        **{"log": noting(notes, "log"), "checkpoint_is_due": lambda n: n == 4},
        **{"write_checkpoint": awaited(notes, "write"), "save_model": awaited(notes, "save")},
    )
    run = make_run(
        SLRun,
        **{
            "alg": GRPO(),
            "trainers": "trainers",
            "tokenizer": "tokenizer",
            "settings": {"seed": 0},
            "context": context,
        },
        cfg=SimpleNamespace(rows_per_step=5),
        rows=SimpleNamespace(count_draws=lambda n: {"data/a/rows": float(n)}),
    )
    run.log(2, {"train/loss": 1.0})
    for step in (2, 3):
        asyncio.run(run.checkpoint_if_due(step, {"m": 1.0}))
    asyncio.run(run.save())
    state = RunState(
        **{"steps_done": 4, "metrics": {"m": 1.0}, "position": {}, "recipe": {"seed": 0}},
        alg_state=state_to_json(run.alg),
    )
    assert notes == [
        ("log", 2, {"train/loss": 1.0, "data/a/rows": 15.0}),
        ("write", "trainers", "tokenizer", state),
        ("save", "trainers", "tokenizer", run.alg),
    ]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_on_pairs_begins_where_policy_and_reference_agree(recipe, ahead):
    """DPO's loss is then log 2, whether the reference is computed at the step or ahead."""
    loaded = load_recipe(SLConfig, recipe({"alg": {"name": "dpo"}, "precompute_ref_logp": ahead}, kind="sl"), [])
    trainer = build_trainer(None, plan_trainer(loaded.cfg, loaded.alg))
    groups = some_answers("pairs", 3)
    run = make_run(
        SLRun,
        **{"cfg": loaded.cfg, "alg": loaded.alg, "trainers": Local(trainer), "layout": trainer.describe_layout()},
        rows=SimpleNamespace(mixed=(), all=lambda: groups),
        context=SimpleNamespace(clock=Clock()),
    )
    if ahead:
        asyncio.run(run.compute_reference())
        assert len(run.reference) == 6
    metrics = asyncio.run(run.train(groups))
    assert metrics["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert metrics["train/tokens"] == sum(s.n_trained for group in groups for s in group)
