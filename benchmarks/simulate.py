"""Measure what overlap brings and how many engines a trainer needs: the real loop, in simulated time.

    python -m benchmarks.simulate --group-seconds 40 --train-seconds 25 --engines 1 2 4 --max-staleness 0 1 2 4
    python -m benchmarks.simulate --run runs/my-20260101-120000 --engines 1 2 4

It runs main_rl's own loop with its own buffer and scheduler (rollouts/); only the engines and the trainer are
simulated: they sleep, on an event loop whose clock jumps. A group takes a time of its own, lognormal with the given
mean and standard deviation; an engine works on --concurrent groups at a time, each as fast as if it were alone. --run
takes the times from a run's metrics.jsonl: those of groups as they were measured, under that run's load.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import main_rl
from configs.schema import min_staleness
from core.types import Group, Prompt, Sample, make_sample
from rollouts.buffer import FinishedGroup, ReplayBuffer, Schedule
from rollouts.generation import Generation
from rollouts.worker import RolloutWorker

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Real asyncio; only its clock jumps to the next timer when nothing can run. Raises where nothing ever will."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        really_select = self._selector.select

        def select(timeout: float | None) -> Any:
            events = really_select(0)
            if timeout is None and not events:
                raise RuntimeError("deadlock: every task waits for another one")
            if timeout and not events:
                self.now += timeout
            return events

        self._selector.select = select

    def time(self) -> float:
        return self.now


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
        variance = math.log(1 + (self.group_std / self.group) ** 2)
        draw = random.Random(f"{self.seed}/{ticket}")
        return draw.lognormvariate(math.log(self.group) - variance / 2, variance**0.5)


@dataclass
class SimulatedEngines:
    """core.workers.Workers that bring an empty answer after a while. Weights that come hold their work up."""

    times: Times
    engines: int
    concurrent: int
    version: int = -1
    held_up: float = 0.0
    """Seconds that syncs have taken so far."""
    slots: list[asyncio.Semaphore] = field(init=False)
    busy: float = 0.0
    """Seconds x groups at work."""

    def __post_init__(self) -> None:
        self.slots = [asyncio.Semaphore(self.concurrent) for _ in range(self.engines)]

    def __len__(self) -> int:
        return self.engines

    async def call_one(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        assert method is RolloutWorker.generate_group
        ticket: int = args[0]
        async with self.slots[rank]:
            version, before = self.version, self.held_up
            await asyncio.sleep(self.times.of_group(ticket))
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

    async def take_weights(self, version: int) -> None:
        self.held_up += self.times.sync
        await asyncio.sleep(self.times.sync)
        self.version = version


def answer(ticket: int, version: int) -> Sample:
    return make_sample(
        prompt=Prompt(id=str(ticket), messages=[]),
        token_ids=[0, 1],
        action_mask=[False, True],
        rollout_logp=[0.0, -1.0],
        versions=[-1, version],
        reward=0.0,
    )


@dataclass
class SimulatedRun:
    """Implement what main_rl.train needs of a Run, in simulated time. Keeps trained groups and the end of each step."""

    turns = None
    schedule: Schedule
    engines: SimulatedEngines
    times: Times
    timeout_s: float = math.inf
    first_step: int = 0
    waited: float = 0.0
    trained: list[list[Group]] = field(default_factory=list)
    drawn: list[FinishedGroup] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generation = Generation(
            self.engines,
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

    async def sync_weights(self, version: int) -> dict[str, float]:
        await self.engines.take_weights(version)
        self.generation.buffer.set_version(version)
        return {}

    async def sync_weights_if_due(self, done: int, learnt: dict[str, float]) -> dict[str, float]:
        if self.schedule.needs_sync(done, version=self.generation.buffer.version, kl=None):
            await self.sync_weights(done)
        return {}

    async def next_groups(self, step: int) -> tuple[list[Group], dict[str, float]]:
        now = asyncio.get_running_loop().time
        start = now()
        groups, drawn = await self.generation.buffer.next_step_groups(step)
        self.waited += now() - start
        self.trained.append(groups)
        self.drawn += drawn
        return groups, {}

    async def add_columns(self, groups: list[Group]) -> list[Group]:
        return groups

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return groups

    async def train(self, groups: list[Group]) -> dict[str, float]:
        await asyncio.sleep(self.times.train)
        return {}

    async def log(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    engines: int
    max_staleness: int
    step_seconds: float
    """Mean over the second half of the run, when the engines' lead has settled."""
    waited: float
    """Share of the run that the trainer waited for data."""
    staleness_mean: float
    staleness_max: int


def forecast(schedule: Schedule, times: Times, *, engines: int, concurrent: int) -> Forecast:
    async def simulate() -> SimulatedRun:
        run = SimulatedRun(schedule, SimulatedEngines(times=times, engines=engines, concurrent=concurrent), times)
        await main_rl.train(run)  # pyright: ignore[reportArgumentType]
        return run

    run = run_in_virtual_time(simulate())
    half = len(run.ends) // 2
    return Forecast(
        engines=engines,
        max_staleness=schedule.max_staleness,
        step_seconds=(run.ends[-1] - run.ends[half - 1]) / (len(run.ends) - half),
        waited=run.waited / run.ends[-1],
        staleness_mean=sum(run.ages) / len(run.ages),
        staleness_max=max(run.ages),
    )


def times_of(run_folder: Path) -> tuple[Times, Schedule]:
    """Return the averages of a run's metrics, without its first step, which is a warm-up."""
    import yaml

    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()][1:]
    if not rows:
        raise SystemExit(f"error: {run_folder} has fewer than two steps in its metrics.jsonl: name a longer run")
    cfg = yaml.safe_load((run_folder / "config.yaml").read_text())
    names = [f"time/{name}" for name in ("groups/mean_s", "groups/std_s", "step_s", "wait_for_data_s", "sync_s")]
    mean = {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}  # no sync: no time of it
    publishes = sum("time/sync_s" in row for row in rows)
    train = mean["time/step_s"] - mean["time/wait_for_data_s"] - mean["time/sync_s"]
    times = Times(
        group=mean["time/groups/mean_s"],
        group_std=mean["time/groups/std_s"],
        train=train,
        sync=mean["time/sync_s"] * len(rows) / max(publishes, 1),
    )
    fresh = round(sum(row["rollout/groups_drawn"] for row in rows) / len(rows))  # what was left out took its time too
    reuse, sync_every = cfg["sample_reuse"], cfg["weight_sync"]["every"]
    return times, Schedule(steps=cfg["steps"], per_step=fresh * reuse, sample_reuse=reuse, sync_every=sync_every)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, help="a run folder: take the times from what it measured")
    parser.add_argument("--group-seconds", type=float, default=40.0, help="of one group, on average")
    parser.add_argument("--group-std", type=float, default=15.0)
    parser.add_argument("--train-seconds", type=float, default=40.0, help="of one step")
    parser.add_argument("--sync-seconds", type=float, default=1.0)
    parser.add_argument("--groups-per-step", type=int, default=64)
    parser.add_argument("--concurrent", type=int, default=64, help="groups that an engine works on at a time")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--trainers", type=float, nargs="+", default=[1], help="times as many, and as fast as many")
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args(argv)
    schedule = Schedule(steps=args.steps, per_step=args.groups_per_step)
    times = Times(group=args.group_seconds, group_std=args.group_std, train=args.train_seconds, sync=args.sync_seconds)
    if args.run:
        times, measured = times_of(args.run)
        schedule = replace(measured, steps=args.steps)
    least = min_staleness(sync_every=schedule.sync_every, sample_reuse=schedule.sample_reuse)
    if min(args.max_staleness) < least:
        raise SystemExit(
            f"error: --max-staleness {min(args.max_staleness)}, and the run's weight_sync.every={schedule.sync_every}, "
            f"sample_reuse={schedule.sample_reuse} need {least} or more"
        )
    print(f"{times}, {schedule.fresh} groups drawn a step, {args.concurrent} at a time in an engine\n")
    headings = ["engines", "trainers", "max_staleness", "s/step", "speed-up", "trainer waits", "staleness", "max"]
    print("".join(f"{heading:>14}" for heading in headings))
    base: float | None = None
    for engines, trainers, max_staleness in itertools.product(args.engines, args.trainers, args.max_staleness):
        scaled = replace(times, train=times.train / trainers)
        predicted = forecast(
            replace(schedule, max_staleness=max_staleness), scaled, engines=engines, concurrent=args.concurrent
        )
        base = base or predicted.step_seconds
        row = [
            engines,
            f"{trainers:g}",
            max_staleness,
            f"{predicted.step_seconds:.2f}",
            f"{base / predicted.step_seconds:.2f}",
        ]
        row += [f"{predicted.waited:.0%}", f"{predicted.staleness_mean:.2f}", predicted.staleness_max]
        print("".join(f"{value:>14}" for value in row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
