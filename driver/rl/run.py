"""RL run: the calls of a training step, in the order of main_rl.py."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from algs.base import PolicyGradient, TurnCredit, accepts_group, assign_advantages
from algs.objective import check_demonstrations
from algs.totals import prepare_update
from algs.validate import check_advantages
from configs.schema import RLConfig
from core import metrics as names
from core.cluster.workers import Workers
from core.errors import ProcessDied, RunStopped
from core.tasks import start_task
from core.timing.phases import Phase
from core.types.batch import RowLayout
from core.types.samples import Group, Prompt, ScoredColumn
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed
from data_feeds.packing.batches import Plan, plan_update
from data_feeds.packing.terms import has_tokens
from driver.alg_state import measure_algorithm, move_algorithm, state_to_json
from driver.checkpoint import RunState
from driver.context import RunContext
from driver.records.rollout_metrics import (
    check_failures,
    measure_drawn,
    measure_groups,
    measure_staleness,
    name_train_metrics,
)
from driver.records.sample_files import describe_sampling
from driver.records.speed import read_tflops
from driver.records.time_account import TimeBreakdown
from driver.rl.colocation import Colocation
from driver.rl.evaluation import RunEvaluation
from driver.rl.observers import PlannedStep, RunObservers
from driver.rl.opponent import Snapshots
from driver.rl.teachers import Reader, move_teachers, score_groups
from rollouts.scheduling.availability import EngineAvailability
from rollouts.scheduling.buffer import ReplayBuffer
from rollouts.scheduling.generation import Generation
from trainers.trainer import Trainer
from trainers.weight_sync.base import WeightSync

T = TypeVar("T")


@dataclass
class Run:
    """RL run, with trainers, engines and observers."""

    cfg: RLConfig
    alg: PolicyGradient
    """The algorithm of the next step: each step replaces it by a copy with another state."""
    prompts: Feed[Prompt]
    evaluation: RunEvaluation | None
    tokenizer: ChatTokenizer
    trainers: Workers[Trainer]
    weights: WeightSync
    context: RunContext
    settings: dict[str, Any]
    """Settings that a resumed run must share with this one; see driver/resume.py."""
    first_step: int
    """First step to run; a resumed run does not repeat earlier ones."""
    generation: Generation
    steps_done: int
    """Number of steps that trained the trainers' weights so far."""
    layout: RowLayout
    """Layout of the trainers' rows, which depends on the loaded model."""
    time: TimeBreakdown
    observers: RunObservers
    colocation: Colocation | None = None
    """State machine of shared devices; None with separate devices."""
    snapshots: Snapshots | None = None
    """Snapshots of the policy that play as opponent."""

    def remaining_steps(self) -> Iterator[int]:
        """Yield the steps that the run makes; `stop_when` may end them early."""
        return self.context.count_steps(self.first_step)

    @property
    def buffer(self) -> ReplayBuffer:
        return self.generation.buffer

    @property
    def engines(self) -> EngineAvailability:
        return self.generation.engines

    async def next_groups(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """Wait for the step's groups, `groups_per_step` of them; return them with their metrics."""
        with self.context.clock.phase(Phase.WAIT_FOR_DATA):
            groups, drawn = await self.while_trainers_wait(self.buffer.next_step_groups(step))
        with self.context.clock.phase(Phase.CHECK):
            check_failures([d.group for d in drawn], max_failed_fraction=self.cfg.reward.max_failed_fraction)
            # The buffer gives up after a number of rejected groups, rather than generate without end.
            if len(groups) < self.cfg.groups_per_step:
                raise RunStopped(
                    f"of {len(drawn)} groups, the algorithm accepts {len(groups)} of the groups_per_step="
                    f"{self.cfg.groups_per_step} that a step needs: the reward may be the same for every completion"
                )
            staleness = measure_staleness(groups, step=step, max_staleness=self.cfg.max_staleness)
            measured = staleness | measure_drawn(drawn) | self.prompts.count_draws(drawn[-1].ticket + 1)
            if self.buffer.sampled is not None:
                measured |= self.buffer.sampled.measure([d.ticket for d in drawn])
                self.buffer.sampled.forget(self.buffer.lowest_ticket)
            return groups, measured

    def accept_group(self, group: Group) -> bool:
        """Tell whether to train on a group that is complete.

        With staleness, groups are complete while the algorithm's state moves. So there the state cannot be read.
        """
        return accepts_group(self.alg if self.cfg.max_staleness == 0 else self.alg.hide_state(), group)

    async def compute_columns(self, groups: list[Group]) -> list[Group]:
        """Compute the columns that the algorithm requires, with the trainer's models as they are now."""
        # With one update per step the policy in training is the proximal policy itself.
        proximal: frozenset[ScoredColumn] = frozenset({"prox_logp"} if self.cfg.updates_per_step > 1 else ())
        with self.context.clock.phase(Phase.LOGP):
            columns, teachers = self.alg.required_columns | proximal, self.alg.teachers
            plan_rows = partial(self._plan, apart=True)
            reader = Reader(cfg=self.cfg, tokenizer=self.tokenizer, plan=self._plan, plan_rows=plan_rows)
            return await score_groups(self.trainers, groups, columns, teachers=teachers, reader=reader)

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        """Assign token advantages, over all groups of the step; those that train nothing come last."""
        with self.context.clock.phase(Phase.ADVANTAGES):
            check_demonstrations(self.alg, groups)
            filled = assign_advantages(self.alg, groups)
            check_advantages(self.alg, groups, filled)
            return sorted(filled, key=lambda group: not has_tokens([group], self.alg.terms))

    async def train(self, groups: list[Group]) -> dict[str, float]:
        """Train on the groups of a step, distributed over its updates."""
        clock = self.context.clock
        with clock.phase(Phase.TRAIN):
            step = self._plan_step(groups)
            self.observers.on_plan(step)
        async with self.observers.around_updates(step):
            with clock.phase(Phase.TRAIN):
                self.time.prefetch_engine_timers()
                # Every rank returns the metrics of the whole step.
                measured, *_ = await self.trainers.scatter(Trainer.step, step.shard(len(self.trainers)))
                self.time.prefetch_trainer_timers()
            self.steps_done += 1
        metrics = name_train_metrics(measured) | step.measure() | measure_algorithm(step.alg)
        metrics |= await self.observers.on_step(step, measured, metrics)
        # after the observers, which ask for gradients that are not finite
        metrics[names.TRAIN_SKIPPED] += step.skipped
        self.alg = await move_algorithm(self.alg, self.trainers, groups, measured)
        with clock.phase(Phase.TRAIN):
            await move_teachers(self.trainers, self.alg, self.steps_done)
            return metrics | await read_tflops(self.trainers)

    def _plan_step(self, groups: list[Group]) -> PlannedStep:
        """Distribute the groups of a step over updates, ranks and micro-batches."""
        k = self.cfg.updates_per_step
        # every k-th group, so that neighbours in time are spread over the updates
        of_updates = [prepare_update(self.alg, groups[i::k]) for i in range(k)]
        # groups without tokens are last, and so are updates; at least one is made, whose plan says why it has none
        made = max(1, sum(has_tokens(own, self.alg.terms) for own in of_updates))
        plans = [self._plan(own) for own in of_updates[:made]]
        batches = [plan.batches() for plan in plans]
        return PlannedStep(step=self.steps_done, alg=self.alg, groups=of_updates, plans=plans, batches=batches)

    def _plan(self, groups: list[Group], *, apart: bool = False) -> Plan:
        """Split groups into micro-batches. apart: samples need not be together."""
        return plan_update(
            groups,
            self.alg.loss_norm,
            self.cfg.trainer.micro_batch_tokens,
            ranks=self.cfg.trainer.data_parallel_size,
            horizon=self.cfg.rollout.max_new_tokens,
            padded=self.layout.padded,
            share_prefixes=self.layout.shares_prefixes,
            whole_groups=self.alg.whole_groups and not apart,
            whole_episodes=self.alg.whole_episodes and not apart,
            terms=() if apart else self.alg.terms,
        )

    async def sync_weights(self, version: int) -> dict[str, float]:
        """Transfer the trainer's weights to every available engine, as `version`."""
        if self.colocation is not None:
            proof = await self.colocation.give_to_engines(version)
        else:
            with self.context.clock.phase(Phase.SYNC):
                if self.snapshots is not None:
                    await self.snapshots.renew(version)
                proof = None
                while proof is None:  # an engine died during the sync: repeat it with the engines that remain
                    proof = await self._publish(version, await self.engines.wait_for(self.engines.taking_weights))
        # After the proof: from here on, new groups count as sampled by this version.
        self.buffer.set_version(version)
        return proof

    async def _publish(self, version: int, engines: Sequence[int]) -> dict[str, float] | None:
        """Transfer the weights to these engines. Return None if an engine died; the others need another sync."""
        # counted before the transfer: a death that was handled meanwhile must not be handled again
        deaths = self.engines.deaths
        try:
            with self.engines.syncing():
                proof = await self.weights.publish_weights(version, engines)
                if self.snapshots is not None:
                    await self.snapshots.send(engines)
        except ProcessDied as death:
            self.engines.report_death(death, deaths)
            return None
        self.engines.weights_arrived(engines, version, deaths)
        return proof

    async def while_trainers_wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the engines' work, and meanwhile send weights to engines that have started."""
        working = start_task(work)
        try:
            # new engines can receive weights only now: the trainers are idle, and a sync needs all of them
            while not working.done():
                started = start_task(self.engines.wait_for(self.engines.needing_weights))
                await asyncio.wait([working, started], return_when=asyncio.FIRST_COMPLETED)
                if started.done():
                    await self._publish(self.steps_done, started.result())
                started.cancel()
            return working.result()
        finally:
            working.cancel()

    async def sync_weights_if_due(self, steps_done: int, train_metrics: dict[str, float]) -> dict[str, float]:
        """Sync weights after `steps_done` steps, if the schedule says so."""
        kl = train_metrics.get(names.MISMATCH_KL)  # absent where no update of the step was made
        if not self.buffer.schedule.needs_sync(steps_done, version=self.buffer.version, kl=kl):
            return {}
        if self.evaluation is not None:
            await self.evaluation.end_pending()
        return await self.sync_weights(steps_done)

    async def log(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """Write the step's samples and metrics."""
        with self.context.clock.phase(Phase.LOG):
            by_turn = isinstance(self.alg, TurnCredit) and self.alg.credit == "turn"
            measured = measure_groups(groups, self.prompts.mixed, by_turn=by_turn) | metrics
            self.context.show_samples(step, groups, every=self.cfg.show_samples)
            measured |= await self.time.start_lap()
        measured[names.ROLLOUT_GROUP_RETRIES] = float(self.generation.n_retries)
        measured[names.ROLLOUT_RESTARTS] = float(self.engines.n_restarts)
        measured[names.ROLLOUT_ENGINES] = float(len(self.engines.serving()))
        measured |= self.generation.judges.measure()
        self.context.early_stop.end(self.generation.judges.describe_excess())
        self.context.log(step, measured)
        with self.context.clock.phase(Phase.LOG):  # last: the thread that writes them takes this one's time
            await self.context.folder.samples.write(step, groups, describe_sampling(self.cfg))

    async def evaluate_if_due(self, steps_done: int) -> dict[str, float]:
        """Evaluate after every `eval_every` steps, in place or beside training."""
        return {} if self.evaluation is None else await self.evaluation.evaluate_if_due(self, steps_done)

    async def evaluate(self, when: str) -> None:
        """Measure the reward on the held-out prompts while the trainers wait."""
        if self.evaluation is not None:
            await self.evaluation.evaluate(self, when)

    async def checkpoint_if_due(self, step: int, metrics: dict[str, float]) -> None:
        """Write a checkpoint after every `checkpoint.every` steps."""
        if not self.context.checkpoint_is_due(step + 1):
            return
        if self.colocation is None:
            return await self._write_checkpoint(step, metrics)
        # At this point the trainers are offloaded, and a checkpoint reads their states. So the device changes hands
        # once more, while no group may start.
        async with self.generation.held():
            await self.colocation.give_to_trainers()
            await self._write_checkpoint(step, metrics)
            await self.colocation.give_to_engines(self.steps_done)

    async def _write_checkpoint(self, step: int, metrics: dict[str, float]) -> None:
        position = self.buffer.get_state()
        state = RunState(steps_done=step + 1, metrics=metrics, position=position, recipe=self.settings)
        opponent_version = 0 if self.snapshots is None else self.snapshots.version
        state = replace(state, alg_state=state_to_json(self.alg), opponent_version=opponent_version)
        await self.context.write_checkpoint(self.trainers, self.tokenizer, state)

    async def save(self) -> None:
        """Write the trained model and the time breakdown."""
        # Now, because a failed write of samples must be known before the run counts as done.
        await self.context.folder.samples.flush()
        if self.colocation is not None:
            await self.colocation.give_to_trainers()
        await self.context.save_model(self.trainers, self.tokenizer, self.alg)
        await self.observers.finish()
        is_colocated = self.colocation is not None
        may_overlap = self.cfg.max_staleness == 0 and self.cfg.backend == "ray"
        self.context.facts |= await self.time.summarize(may_overlap=may_overlap, is_colocated=is_colocated)
