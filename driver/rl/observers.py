"""Observers of an RL run, which measure or record steps.

`Run` calls them at four moments. They read and change nothing, so a run is the same to the bit with all of them and
with none. They are no interface for users: driver/start/observers.py lists them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from algs.base import PolicyGradient
from configs.schema import RLConfig
from core import metrics as names
from core.cluster.workers import Workers, copy_to_groups
from core.types.allowed_tokens import AllowedTokens
from core.types.batch import RowLayout
from core.types.samples import Batch, Group
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.packing.batches import Plan
from driver.checkpoint import Checkpoint
from driver.context import RunContext
from driver.load_recipe import Loaded
from trainers.observers import ObserverFactory
from trainers.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A training step before its updates are made."""

    step: int
    """Number of steps that trained the weights so far."""
    alg: PolicyGradient
    """The algorithm, with the state and the scheduled hyper-parameters of this step."""
    groups: list[list[Group]]
    """[update], with their advantages."""
    plans: list[Plan]
    """[update], of those that are made: the last ones are not if no token of theirs would be trained."""
    batches: list[list[list[Batch]]]
    """[update][rank][micro-batch], as `plans`"""

    @property
    def skipped(self) -> int:
        """Number of updates that are not made."""
        return len(self.groups) - len(self.plans)

    def shard(self, n_workers: int) -> list[list[list[Batch]]]:
        """Return the batches of each worker, [worker][update][micro-batch]; a sequence group has equal batches."""
        skipped: list[list[Batch]] = [[] for _ in range(self.skipped)]
        return copy_to_groups([[*updates, *skipped] for updates in zip(*self.batches, strict=True)], n_workers)

    def measure(self) -> dict[str, float]:
        """Return the padding and the sharing of the rows, averaged over the updates."""
        k = len(self.plans)
        shared = sum(plan.measure_shared(own) for plan, own in zip(self.plans, self.batches, strict=True)) / k
        return {names.TRAIN_PADDING: sum(plan.padding for plan in self.plans) / k, names.TRAIN_SHARED: shared}


class RunObserver:
    """Base of the observers of a run, in the driver."""

    def on_plan(self, step: PlannedStep) -> None:
        """Observe a step before the batches are sent. An observer may fill `Batch.compared`."""

    @asynccontextmanager
    async def around_updates(self, step: PlannedStep) -> AsyncGenerator[None]:
        """Surround the updates of a step."""
        yield

    async def on_step(
        self, step: PlannedStep, measured: Mapping[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Observe a finished step; return metrics for the log.

        measured: metrics of the trainers, including those of trainer observers. metrics: log entries so far.
        """
        return {}

    async def finish(self) -> None:
        """Finish, after the model was saved."""


class RunObservers(RunObserver):
    """All observers of a run, called in order."""

    def __init__(self, observers: Sequence[RunObserver] = ()):
        self.observers = observers

    def on_plan(self, step: PlannedStep) -> None:
        for observer in self.observers:
            observer.on_plan(step)

    @asynccontextmanager
    async def around_updates(self, step: PlannedStep) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for observer in self.observers:
                await stack.enter_async_context(observer.around_updates(step))
            yield

    async def on_step(
        self, step: PlannedStep, measured: Mapping[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        found = dict[str, float]()
        for observer in self.observers:
            # Each sees the metrics of those before it: a step snapshot contains those of compared losses.
            found |= await observer.on_step(step, measured, {**metrics, **found})
        return found

    async def finish(self) -> None:
        for observer in self.observers:
            await observer.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """The parts of a run that its observers read."""

    loaded: Loaded[RLConfig]
    tokenizer: ChatTokenizer
    allowed_tokens: AllowedTokens
    checkpoint: Checkpoint | None
    """The checkpoint that the run resumes."""
    context: RunContext
    trainers: Workers[Trainer]
    layout: RowLayout


class ObserverPlan(Protocol):
    """Plan of an observer that a recipe enables, checked before the start. It has a trainer and a driver part."""

    @property
    def on_trainer(self) -> ObserverFactory:
        """Factory of the part in every trainer rank."""
        ...

    def start(self, run: StartedRun) -> RunObserver:
        """Return the observer in the driver."""
        ...
