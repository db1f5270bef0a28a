"""The schedule of an RL run: synchronous training to the bit, and bounded staleness whatever the timing."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import main_rl
from configs.rollout_schema import RewardConfig, RolloutConfig
from configs.schema import RLConfig
from core.errors import RunStopped
from core.types.samples import Prompt, Sample
from data_feeds.packing.batches import plan_update
from driver.checkpoint import find_checkpoint
from driver.context import RunContext, run_in_context
from driver.load_recipe import load_recipe
from driver.records.rollout_metrics import count_versions, measure_staleness
from driver.rl.run import Run
from driver.rl.setup import prepare, start
from rollouts.envs.single_turn import SingleTurn as OneTurn
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer, Schedule
from rollouts.scheduling.generation import Generation
from rollouts.worker import RolloutWorker
from tools.benchmarks import simulate
from tools.benchmarks.simulate import forecast, times_of
from tools.benchmarks.simulated_run import SimulatedEngines, SimulatedRun, Times, run_in_virtual_time
from trainers.trainer import Trainer
from unit_tests.helpers.episodes import Words
from unit_tests.helpers.examples import run_here, sample_of
from unit_tests.helpers.runs import SEVENS, evaluations_of, file_of, folder_of, metrics_of, numbers_of
from unit_tests.helpers.simulated_runs import Choosy, a_schedule

pytestmark = pytest.mark.usefixtures("one_thread")


async def ten_lines(run: Run) -> list[float]:
    """Synchronous training, as it would be written without a buffer, a scheduler or a schedule."""
    losses = []
    await run.weights.publish_weights(0)
    for step in range(run.cfg.steps):
        tickets = range(step * run.cfg.groups_per_step, (step + 1) * run.cfg.groups_per_step)
        asked = [
            run.generation.workers.call_one(0, RolloutWorker.generate_group, t, run.prompts.draw(t), run.cfg.group_size)
            for t in tickets
        ]
        groups = run.alg.compute_advantages(list(await asyncio.gather(*asked)))
        plan = plan_update(
            groups,
            run.alg.loss_norm,
            run.cfg.trainer.micro_batch_tokens,
            horizon=8,
            padded=run.layout.padded,
            share_prefixes=run.layout.shares_prefixes,
        )
        losses.append((await run.trainers.scatter(Trainer.step, [plan.batches()]))[0]["loss"])
        await run.weights.publish_weights(step + 1)
    return losses


def session_of(path: str, body) -> None:
    prepared = prepare(load_recipe(RLConfig, path, []))

    async def framed(context: RunContext) -> None:
        await body(await start(prepared, context))

    run_in_context(prepared.loaded.cfg, framed)


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_without_lag_it_is_synchronous_training_to_the_bit(recipe, tmp_path, engine):
    sevens = file_of(tmp_path / "sevens.py", SEVENS)
    path = recipe({"steps": 20, "trainer.lr": 3e-3, "rollout.engine": engine, "reward.function": sevens})
    expected: list[float] = []

    async def plainly(run: Run) -> None:
        expected.extend(await ten_lines(run))

    session_of(path, plainly)
    session_of(path, main_rl.train)
    [metrics] = [found for f in (tmp_path / "runs").iterdir() if (found := numbers_of(f))]
    losses = [m["train/loss"] for m in metrics]
    assert losses == [x.hex() for x in expected]
    assert len(set(losses)) > 10, "the runs are no constant"


def prompts_of(folder: Path, step: int) -> list[str]:
    rows = (folder / "samples" / f"step_{step:05d}.jsonl").read_text().splitlines()
    return [json.loads(row)["id"] for row in rows]


def test_a_run_stopped_with_groups_under_way_trains_on_the_same_prompts(recipe, tmp_path, sums):
    """With evaluation in between, and a publish every second step."""
    changes = {"steps": 8, "max_staleness": 2, "weight_sync.every": 2, "checkpoint": {"every": 3, "keep": 9}}
    held_out = {"data.eval": str(sums / "eval.parquet"), "data.eval_rows": 3, "eval_every": 2}
    path = recipe(changes | held_out | {"reward.function": file_of(tmp_path / "sevens.py", SEVENS)})
    assert run_here(main_rl, "--config", path, "name=whole") == (0, "")
    whole = folder_of(tmp_path, "whole")
    at = find_checkpoint(str(whole / "checkpoints/step_00003"))
    assert at.state.position["finished"] or at.state.position["started"], "the engines were ahead"
    assert run_here(main_rl, "--config", path, "name=resumed", f"resume={at.folder}") == (0, "")
    resumed = folder_of(tmp_path, "resumed")
    assert [prompts_of(resumed, step) for step in range(3, 8)] == [prompts_of(whole, step) for step in range(3, 8)]
    for folder, first in ((whole, 0), (resumed, 3)):
        rows = metrics_of(folder)
        lags = [row["rollout/staleness_max"] for row in rows]
        assert 0 < max(lags) <= 2, lags
        assert rows[-1]["rollout/staleness_mean"] == pytest.approx(
            sum(n * rows[-1][f"rollout/staleness/{n}"] for n in range(3))
        )
        evaluated = evaluations_of(folder)
        assert [row["eval/version"] for row in evaluated.values()] == [*evaluated] and {first, 8} <= evaluated.keys()


class Adversary(SimulatedEngines):
    """Simulate one engine ten times slower, groups of wildly different length, requests that are lost, slow syncs."""

    def __init__(self, draw: random.Random, lose: float):
        self.draw, self.lose = draw, lose
        times = Times(
            group=1.0, group_std=draw.choice([0.0, 1.0, 8.0]), train=draw.choice([0.0, 1.0, 5.0]), sync=draw.random()
        )
        super().__init__(
            times=replace(times, seed=draw.randrange(10**9)), engines=draw.randint(1, 3), concurrent=draw.randint(1, 6)
        )
        self.asked: list[int] = []

    async def call_one(self, rank, method, *args, **kwargs):
        ticket = args[0]
        if ticket not in self.asked and self.draw.random() < self.lose:
            self.asked.append(ticket)
            await asyncio.get_running_loop().create_future()
        self.asked.append(ticket)
        if rank == 0:
            async with self.slots[0]:
                await asyncio.sleep(10 * self.draw.random())
        return await super().call_one(rank, method, *args, **kwargs)


def play(seed: int) -> None:
    draw = random.Random(seed)
    schedule = a_schedule(draw)
    engines = Adversary(draw, draw.choice([0.0, 0.0, 0.1]))

    async def body() -> Choosy:
        run = Choosy(schedule, engines, engines.times, timeout_s=10_000.0)
        run.leaves_out, run.draw = draw.choice([0.0, 0.3]), draw
        await main_rl.train(run)
        return run

    run = run_in_virtual_time(body())
    told = f"seed {seed}, {schedule}"
    assert max(run.ages) <= schedule.max_staleness, told
    kept = [d.ticket for d in run.drawn if d.accepted]
    trained = [[int(g[0].prompt.id) for g in groups] for groups in run.trained]
    windows = [schedule.window(step) for step in range(schedule.steps)]
    assert trained == [kept[w.start : w.stop] for w in windows], told
    assert [d.ticket for d in run.drawn] == list(range(len(run.drawn))), f"a ticket is lost or used twice: {told}"
    assert set(engines.asked) == set(range(len(run.drawn))), f"something was generated for nothing: {told}"


@pytest.mark.parametrize("block", range(4))
def test_no_timing_breaks_the_bound_loses_a_ticket_or_deadlocks(block):
    for seed in range(block * 250, (block + 1) * 250):
        play(seed)


@pytest.mark.verify
def test_thousands_of_other_timings_do_not_either():
    for seed in range(10_000, 16_000):
        play(seed)


class InOrderOfCompletion(ReplayBuffer):
    """The mistake that ticket order avoids."""

    def add_group(self, drawn: FinishedGroup) -> None:
        self.started.remove(drawn.ticket)
        self._put_ready(drawn)
        self._note_change()


class Unchecked(SimulatedRun):
    def measure(self, step, groups, drawn):
        return {}


def lengths_trained_on(max_staleness: int, buffer: type[ReplayBuffer] = ReplayBuffer) -> list[float]:
    """Every fourth prompt is hard: its answers take sixty times as long."""

    class Planted(Times):
        def of_group(self, ticket: int) -> float:
            return (60.0 if ticket % 4 == 3 else 1.0) * (0.5 + random.Random(ticket).random())

    times = Planted(group=1.0, group_std=0.0, train=2.0, sync=0.1)
    schedule = Schedule(steps=40, per_step=16, max_staleness=max_staleness)

    async def body() -> SimulatedRun:
        run = Unchecked(schedule, SimulatedEngines(times=times, engines=2, concurrent=64), times)
        run.generation.buffer = buffer(schedule)
        await main_rl.train(run)
        return run

    run = run_in_virtual_time(body())
    return [times.of_group(int(g[0].prompt.id)) for groups in run.trained[:10] for g in groups]


def distance(a: list[float], b: list[float]) -> float:
    """Kolmogorov and Smirnov's: the largest difference of the two cumulative distributions."""
    return max(abs(sum(x <= at for x in a) / len(a) - sum(x <= at for x in b) / len(b)) for at in (*a, *b))


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_overlap_trains_on_the_same_prompts_and_lengths(max_staleness):
    synchronous = lengths_trained_on(0)
    critical = 1.36 * (2 / len(synchronous)) ** 0.5  # of two samples of 160 at the 5 % level
    assert distance(lengths_trained_on(max_staleness), synchronous) < critical
    assert mean(x > 10 for x in lengths_trained_on(max_staleness)) == 0.25
    if max_staleness == 4:
        biased = lengths_trained_on(max_staleness, InOrderOfCompletion)
        assert distance(biased, synchronous) > critical, "the test sees the mistake where it is made"


def test_a_group_that_never_comes_ends_the_run_with_its_ticket():
    class Deaf(SimulatedEngines):
        async def call_one(self, rank, method, *args, **kwargs):
            await asyncio.get_running_loop().create_future()

    times = Times(group=1.0, group_std=0.0, train=1.0, sync=0.0)
    run = SimulatedRun(Schedule(steps=1, per_step=1), Deaf(times=times, engines=2, concurrent=1), times, timeout_s=5.0)
    with pytest.raises(RunStopped, match=r"ticket 0 was requested twice, from engine 0 first.*rollout.timeout_s=5"):
        run_in_virtual_time(main_rl.train(run))


def test_an_engine_error_ends_the_run_and_a_trainer_error_the_generation():
    class Broken(SimulatedEngines):
        async def call_one(self, rank, method, *args, **kwargs):
            raise RunStopped("engine 1 died")

    class Diverged(SimulatedRun):
        async def train(self, groups):
            raise RunStopped("the loss diverged")

    times = Times(group=1.0, group_std=0.0, train=1.0, sync=0.0)
    schedule = Schedule(steps=3, per_step=2, max_staleness=1)
    with pytest.raises(RunStopped, match="engine 1 died"):
        run_in_virtual_time(main_rl.train(SimulatedRun(schedule, Broken(times=times, engines=1, concurrent=9), times)))
    engines = SimulatedEngines(times=times, engines=1, concurrent=9)
    with pytest.raises(RunStopped, match="the loss diverged"):
        run_in_virtual_time(main_rl.train(Diverged(schedule, engines, times)))


def test_overlap_hides_the_shorter_side():
    times = Times(group=10.0, group_std=0.0, train=10.0, sync=0.2)
    synchronous, overlapped = (
        forecast(Schedule(steps=30, per_step=4, max_staleness=lag), times, engines=1, concurrent=8) for lag in (0, 1)
    )
    assert synchronous.step_seconds == pytest.approx(20.2)
    assert synchronous.step_seconds / overlapped.step_seconds > 1.8
    assert (synchronous.staleness_max, overlapped.staleness_max) == (0, 1)


def test_a_buffer_is_saved_and_goes_on_where_it_was():
    """Ask again for what was out, and not for what had come; the window of a reused group stays."""
    schedule = Schedule(steps=9, per_step=4, max_staleness=5, sample_reuse=2)

    def drawn(ticket: int, accepted: bool = True) -> FinishedGroup:
        from tools.benchmarks.simulated_run import answer

        return FinishedGroup(ticket=ticket, group=[answer(ticket, 0)], accepted=accepted, seconds=1.5)

    async def body() -> None:
        buffer = ReplayBuffer(schedule)
        for ticket in range(9):
            assert await buffer.reserve_ticket() == ticket
        for ticket in (0, 1, 2, 3, 4, 6, 8):
            buffer.add_group(drawn(ticket, accepted=ticket != 1))
        groups, account = await buffer.next_step_groups(0)
        assert [g[0].prompt.id for g in groups] == ["0", "2", "3", "4"] and len(account) == 5
        state = json.loads(json.dumps(buffer.get_state()))
        assert state["started"] == [5, 7] and [c["ticket"] for c in state["finished"]] == [3, 4, 6, 8]
        again = ReplayBuffer.from_state(state, schedule, lambda t: Prompt(id=str(t), messages=[]), step=1)
        assert again.ready[0] == buffer.ready[0] and again.waiting == buffer.waiting
        assert [await again.reserve_ticket() for _ in range(3)] == [5, 7, 9]
        again.add_group(drawn(5))
        groups, account = await again.next_step_groups(1)
        assert [g[0].prompt.id for g in groups] == ["3", "4", "5", "6"]
        assert [d.ticket for d in account] == [5, 6], "3 and 4 were told of in step 0"
        with pytest.raises(RuntimeError, match="finished twice"):
            again.add_group(drawn(5))

    run_in_virtual_time(body())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight_sync.every": 3, "max_staleness": 1}, "raise max_staleness to 2"),
        ({"sample_reuse": 2, "max_staleness": 0}, "raise max_staleness to 1"),
        ({"sample_reuse": 3, "max_staleness": 2}, "groups_per_step=4 must be a multiple of sample_reuse=3"),
        ({"weight_sync.max_kl": 0.1}, "raise weight_sync.every"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(recipe, changes, says):
    from core.errors import UserError

    with pytest.raises(UserError, match=says):
        load_recipe(RLConfig, recipe(changes), [])


def test_weights_go_out_earlier_where_the_policy_drifts():
    schedule = Schedule(steps=100, per_step=1, max_staleness=7, sync_every=8, max_kl=0.1)
    assert not schedule.needs_sync(3, version=0, kl=0.1)
    assert schedule.needs_sync(3, version=0, kl=0.2)
    assert schedule.needs_sync(8, version=0, kl=None) and schedule.needs_sync(100, version=99, kl=None)


def test_generation_asks_the_engine_with_the_least_to_do():
    times = Times(group=1.0, group_std=0.0, train=0.0, sync=0.0)
    engines = SimulatedEngines(times=times, engines=3, concurrent=9)
    schedule = Schedule(steps=1, per_step=7)

    async def body() -> list[int]:
        generation = Generation(
            engines,
            draw_prompt=lambda t: Prompt(id=str(t), messages=[]),
            accept_group=lambda g: True,
            buffer=ReplayBuffer(schedule),
            group_size=1,
            timeout_s=9.0,
        )
        async with generation.running_in_background():
            await asyncio.sleep(0.5)
            return [*generation.engines.groups]

    assert run_in_virtual_time(body()) == [3, 2, 2]


@pytest.mark.parametrize("says_so", [True, False])
def test_an_engine_that_loses_groups_is_asked_for_fewer(says_so):
    class Lossy(SimulatedEngines):
        async def call_one(self, rank, method, *args, **kwargs):
            asked[rank] += 1
            if rank == 0:
                await asyncio.sleep(5.0 if says_so else 1e9)
                return None
            return await super().call_one(rank, method, *args, **kwargs)

    asked = [0, 0]
    times = Times(group=1.0, group_std=0.0, train=1.0, sync=0.0)
    run = SimulatedRun(Schedule(steps=20, per_step=4), Lossy(times=times, engines=2, concurrent=9), times, 5.0)
    run_in_virtual_time(main_rl.train(run))
    assert run.generation.n_retries == asked[0] <= 8, "of 80"


def test_a_group_that_takes_too_long_is_given_up_where_it_is_made():
    given_up = []

    class Stuck:
        async def generate(self, token_ids, **kwargs):
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                given_up.append(token_ids)
                raise

    class OnePrompt(Words):
        def render(self, messages, tools=()):
            return [1, 2]

    rollout = RolloutConfig(max_new_tokens=4, timeout_s=0.05)
    rewards: Any = None  # never reached
    engine: Any = Stuck()
    worker = RolloutWorker(
        engine,
        OnePrompt(),
        lambda prompt: OneTurn(prompt),
        rewards,
        reward=RewardConfig(function="x"),
        rollout=rollout,
        seed=0,
    )
    assert asyncio.run(worker.generate_group(0, Prompt(id="p", messages=[]), 3)) is None
    assert given_up == [[1, 2]] * 3, "the engine's slots are free"


def test_groups_that_nobody_wants_do_not_outlast_the_training():
    """A run that is resumed for fewer steps had more under way than it needs."""
    schedule = Schedule(steps=2, per_step=1, max_staleness=4)
    times = Times(group=1.0, group_std=0.0, train=1.0, sync=0.0)

    class Late(SimulatedEngines):
        async def call_one(self, rank, method, *args, **kwargs):
            if args[0] > 1:
                await asyncio.sleep(1e9)
            return await super().call_one(rank, method, *args, **kwargs)

    run = SimulatedRun(schedule, Late(times=times, engines=1, concurrent=9), times, first_step=1)
    state = {"ticket": 5, "started": [1, 2, 3, 4], "n_reported": 0, "finished": [], "images": {}}
    draw = run.generation.draw_prompt
    run.generation.buffer = ReplayBuffer.from_state(state, schedule, draw, step=1)

    async def seconds() -> float:
        await main_rl.train(run)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(seconds()) < 10
    assert [g[0].prompt.id for [g] in run.trained] == ["1"]


def test_the_forecast_of_a_run_counts_what_was_drawn_and_each_publish(tmp_path):
    recipe = {"steps": 9, "groups_per_step": 8, "sample_reuse": 2, "weight_sync": {"every": 3}}
    (tmp_path / "config.yaml").write_text(json.dumps(recipe))
    spent = {"time/groups/mean_s": 2.0, "time/groups/std_s": 1.0, "time/step_s": 10.0, "time/wait_for_data_s": 4.0}
    rows = [spent | {"rollout/groups_drawn": 6} | ({"time/sync_s": 3.0} if n % 3 == 0 else {}) for n in range(7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    times, schedule = times_of(tmp_path)
    assert (times.sync, times.train) == (pytest.approx(3.0), pytest.approx(5.0))
    assert schedule == Schedule(steps=9, per_step=12, sample_reuse=2, sync_every=3), "6 new groups, of which 4 are kept"
    with pytest.raises(
        SystemExit, match=r"--max-staleness 2, and the run's weight_sync.every=3, sample_reuse=2 need 3"
    ):
        simulate.main(["--run", str(tmp_path), "--max-staleness", "2"])


def sampled_by(*versions: int) -> Sample:
    """After a prompt of one token."""
    n = len(versions)
    return sample_of([1] * (n + 1), [False] + [True] * n, versions=[-1, *versions])


def test_the_versions_of_a_sample_are_counted_oldest_first():
    mixed = ((6, 4, 9, 4, 6, 4), {4: 3, 6: 2, 9: 1})
    for versions, counts in (((), {}), ((5, 5), {5: 2}), ((7, 4, 4), {4: 2, 7: 1}), mixed):
        assert list(count_versions(sampled_by(*versions)).items()) == list(counts.items()), versions
    assert measure_staleness([[sampled_by()]], step=4, max_staleness=1) == {}


def test_lags_are_counted_by_token_and_a_wrong_one_stops_the_run():
    groups = [[sampled_by(3, 3, 4), sampled_by(4)], [sampled_by(4, 4), sampled_by(2, 2)]]
    assert measure_staleness(groups, step=4, max_staleness=2) == {
        "rollout/staleness_mean": pytest.approx(6 / 8),
        "rollout/staleness_max": 2.0,
        "rollout/mixed_versions_fraction": 0.25,
        "rollout/staleness/0": 0.5,
        "rollout/staleness/1": 0.25,
        "rollout/staleness/2": 0.25,
    }
    for step, max_staleness, said in ((4, 1, "2 steps old"), (3, 2, "-1 steps old")):
        with pytest.raises(RunStopped, match=said):
            measure_staleness(groups, step=step, max_staleness=max_staleness)
