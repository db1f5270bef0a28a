"""A training run in simulated time: main_rl's loop with engines and a trainer that only sleep.

tools/benchmarks/simulate.py makes forecasts with it, and tests play schedules through it.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from core.timing.clock import Clock
from core.types.arrays import INTS, SINGLE, Ids
from core.types.samples import Group, Prompt, Sample
from driver.records.rollout_metrics import check_failures, measure_drawn, measure_groups, measure_staleness
from driver.rl.run import Run
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer, Schedule
from rollouts.scheduling.generation import Generation
from rollouts.worker import RolloutWorker

T = TypeVar("T")
BLOCK = 4096
"""Tickets whose times are drawn at once."""
IDS, MASK = np.array([0, 1], dtype=INTS), np.array([False, True])
LOGP = np.array([0.0, -1.0], dtype=SINGLE)


class JumpingSelector(selectors.DefaultSelector):
    """Selector that never waits: it moves its clock to the time at which the next timer is due."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # real events first: signals and calls from other threads still arrive
        events = super().select(0)
        # no timer and no event: a real loop would wait forever
        if timeout is None and not events:
            raise RuntimeError("deadlock: every task waits for another one")
        if timeout and not events:
            self.now += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Real asyncio; only its clock jumps to the next timer when nothing can run. Raises where nothing ever will."""

    def __init__(self) -> None:
        self.selector = JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def run_in_virtual_time(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of everything that takes time."""

    group: float
    group_std: float
    train: float
    """Seconds of a step's log-probabilities and updates."""
    sync: float
    seed: int = 0

    def of_group(self, ticket: int) -> float:
        """Lognormal with this mean and standard deviation."""
        if self.group_std == 0:
            return self.group
        # of the logarithm; minus half of it in the mean, because exp of a normal number is larger on average
        variance = math.log(1 + (self.group_std / self.group) ** 2)
        drawn = draw_normals(self.seed, ticket // BLOCK)[ticket % BLOCK]
        return math.exp(math.log(self.group) - variance / 2 + variance**0.5 * drawn)


@cache
def draw_normals(seed: int, block: int) -> list[float]:
    """Return standard normal numbers of BLOCK tickets."""
    # in blocks, because making a generator costs much more than drawing a number
    return np.random.default_rng([seed, block]).standard_normal(BLOCK).tolist()


@dataclass
class SimulatedEngines:
    """core.cluster.workers.Workers that bring an empty answer after a while. Weights that come hold their work up."""

    times: Times
    engines: int
    concurrent: int
    version: int = -1
    held_up: float = 0.0
    """Seconds that syncs have taken so far."""
    slots: list[asyncio.Semaphore] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [asyncio.Semaphore(self.concurrent) for _ in range(self.engines)]

    def __len__(self) -> int:
        return self.engines

    async def call_one(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        assert method is RolloutWorker.generate_group
        ticket: int = args[0]
        async with self.slots[rank]:
            # weights that come later do not change the version: a group keeps that of its first token
            version, before = self.version, self.held_up
            await asyncio.sleep(self.times.of_group(ticket))
            # a sync may come while this group already makes up for another one
            while (more := self.held_up - before) > 0:
                before = self.held_up
                await asyncio.sleep(more)
            return [answer(ticket, version)]

    async def call_all(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    async def scatter(self, method: Any, shards: Any, *args: Any, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    async def check_health(self, rank: int) -> tuple[bool, str]:
        return True, f"engine {rank} is simulated"

    def attribute(self, name: str) -> Any:
        raise NotImplementedError

    def with_deadline(self, timeout_s: float, *, key: str) -> Any:
        raise NotImplementedError

    async def publish_weights(self, version: int, engines: Sequence[int] | None = None) -> dict[str, float]:
        """Take the weights, as trainers.weight_sync.base.WeightSync."""
        self.held_up += self.times.sync
        await asyncio.sleep(self.times.sync)
        self.version = version
        return {}


def answer(ticket: int, version: int) -> Sample:
    """Return a sample of one prompt token and one sampled token; the arrays are shared, as nobody writes into them."""
    return Sample(
        prompt=Prompt(id=str(ticket), messages=[]),
        token_ids=IDS,
        action_mask=MASK,
        rollout_logp=LOGP,
        versions=make_versions(version),
        reward=0.0,
    )


@cache
def make_versions(version: int) -> Ids:
    return np.array([-1, version], dtype=INTS)


@dataclass(repr=False)  # asyncio writes the result of a task at its end, and nobody reads it
class SimulatedRun:
    """Run for main_rl.train in simulated time. It keeps the trained groups and the end of each step.

    How weights reach engines, also those that come later, is driver/rl/run.py's own code.
    """

    schedule: Schedule
    weights: SimulatedEngines
    times: Times
    timeout_s: float = math.inf
    first_step: int = 0
    waited: float = 0.0
    trained: list[list[Group]] = field(default_factory=list)
    drawn: list[FinishedGroup] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    context: Any = field(default_factory=lambda: SimpleNamespace(clock=Clock()))
    colocation = None
    snapshots = None
    # taken from Run and not written anew, so that a forecast is of the real schedule
    buffer = Run.buffer
    engines = Run.engines
    sync_weights = Run.sync_weights
    _publish = Run._publish
    while_trainers_wait = Run.while_trainers_wait

    def __post_init__(self) -> None:
        self.steps_done = self.first_step
        self.generation = Generation(
            self.weights,
            draw_prompt=lambda ticket: Prompt(id=str(ticket), messages=[]),
            accept_group=self.accept_group,
            buffer=ReplayBuffer(self.schedule),
            group_size=1,
            timeout_s=self.timeout_s,
        )

    @property
    def steps(self) -> int:
        return self.schedule.steps

    def remaining_steps(self) -> Iterator[int]:
        return iter(range(self.first_step, self.steps))

    def accept_group(self, group: Group) -> bool:
        return True

    async def sync_weights_if_due(self, done: int, learnt: dict[str, float]) -> dict[str, float]:
        if self.schedule.needs_sync(done, version=self.generation.buffer.version, kl=None):
            await self.sync_weights(done)
        return {}

    async def next_groups(self, step: int) -> tuple[list[Group], dict[str, float]]:
        now = asyncio.get_running_loop().time
        start = now()
        groups, drawn = await self.while_trainers_wait(self.buffer.next_step_groups(step))
        self.waited += now() - start
        self.trained.append(groups)
        self.drawn += drawn
        return groups, self.measure(step, groups, drawn)

    def measure(self, step: int, groups: list[Group], drawn: list[FinishedGroup]) -> dict[str, float]:
        """Measure and check the groups of a step as a run does."""
        check_failures([d.group for d in drawn], max_failed_fraction=0.0)
        staleness = measure_staleness(groups, step=step, max_staleness=self.schedule.max_staleness)
        return staleness | measure_drawn(drawn)

    async def compute_columns(self, groups: list[Group]) -> list[Group]:
        return groups

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return groups

    async def train(self, groups: list[Group]) -> dict[str, float]:
        await asyncio.sleep(self.times.train)
        self.steps_done += 1
        return {}

    async def log(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
        measure_groups(groups)
        self.ends.append(asyncio.get_running_loop().time())

    async def evaluate(self, when: str) -> dict[str, float]:
        return {}

    async def evaluate_if_due(self, done: int) -> dict[str, float]:
        return {}

    async def checkpoint_if_due(self, step: int, metrics: dict[str, float]) -> None:
        return

    async def save(self) -> None:
        return

    @property
    def ages(self) -> list[int]:
        """Return the age in steps of every group's oldest token when the group was trained on."""
        return [
            step - min(s.versions[-1] for s in group) for step, groups in enumerate(self.trained) for group in groups
        ]
