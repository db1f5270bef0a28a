"""Simulate what overlap brings and how many engines a trainer needs: the real loop, in simulated time.

    python -m tools.benchmarks.simulate --group-seconds 40 --train-seconds 25 --engines 1 2 4 --max-staleness 0 1 2 4
    python -m tools.benchmarks.simulate --run runs/my-20260101-120000 --engines 1 2 4

It runs main_rl's own loop with its own buffer and scheduler (rollouts/); only the engines and the trainer are
simulated: they sleep, on an event loop whose clock jumps. A group takes a time of its own, lognormal with the given
mean and standard deviation. An engine works on --concurrent groups at a time, each as fast as if it were alone. --run
takes the times from a run's metrics.jsonl: those of groups as they were measured, under that run's load.

The last three columns are no simulation: the CPU seconds of this process per step; how many of them the simulated
engines take, which is measured again without a driver; and the share of the others, the driver's own for schedule,
requests and metrics, in the step that was simulated. The calls of Ray do not count; what the driver does with every
token is tools/benchmarks/driver_cost.py. A large cluster, with 100,000 groups of one sample in each step:

    python -m tools.benchmarks.simulate --engines 1000 --groups-per-step 100000 --concurrent 128 --steps 2 \
        --max-staleness 0
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import main_rl
from configs.sync_schema import min_staleness
from core.gc_control import collecting_seldom
from rollouts.scheduling.buffer import Schedule
from rollouts.worker import RolloutWorker
from tools.benchmarks.processes import read_metrics
from tools.benchmarks.simulated_run import SimulatedEngines, SimulatedRun, Times, run_in_virtual_time


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
    process_seconds: float
    """CPU seconds of this process per step: the driver's own, and those of the simulated engines."""
    engine_seconds: float

    @property
    def driver_share(self) -> float:
        return (self.process_seconds - self.engine_seconds) / self.step_seconds


def forecast(schedule: Schedule, times: Times, *, engines: int, concurrent: int) -> Forecast:
    async def simulate() -> SimulatedRun:
        run = SimulatedRun(schedule, SimulatedEngines(times=times, engines=engines, concurrent=concurrent), times)
        await main_rl.train(run)  # pyright: ignore[reportArgumentType]
        return run

    began = time.process_time()
    with collecting_seldom(True):  # as in a run on Ray
        run = run_in_virtual_time(simulate())
    spent = time.process_time() - began
    half = len(run.ends) // 2
    return Forecast(
        engines=engines,
        max_staleness=schedule.max_staleness,
        step_seconds=(run.ends[-1] - run.ends[half - 1]) / (len(run.ends) - half),
        waited=run.waited / run.ends[-1],
        staleness_mean=sum(run.ages) / len(run.ages),
        staleness_max=max(run.ages),
        process_seconds=spent / len(run.ends),
        engine_seconds=time_engines(schedule.fresh, times, engines=engines, concurrent=concurrent),
    )


def time_engines(groups: int, times: Times, *, engines: int, concurrent: int) -> float:
    """Return the CPU seconds of simulated engines for so many groups, without those of a task for each."""

    async def answer(ticket: int, simulated: SimulatedEngines) -> None:
        await simulated.call_one(ticket % engines, RolloutWorker.generate_group, ticket)

    async def do_nothing(ticket: int, simulated: SimulatedEngines) -> None:
        await asyncio.sleep(0)

    async def play(call: Callable[[int, SimulatedEngines], Coroutine[Any, Any, None]]) -> None:
        simulated = SimulatedEngines(times=times, engines=engines, concurrent=concurrent)
        await asyncio.gather(*(call(ticket, simulated) for ticket in range(groups)))

    spent: list[float] = []
    for call in (answer, do_nothing):
        began = time.process_time()
        with collecting_seldom(True):
            run_in_virtual_time(play(call))
        spent.append(time.process_time() - began)
    return spent[0] - spent[1]


def times_of(run_folder: Path) -> tuple[Times, Schedule]:
    """Return the averages of a run's metrics, without its first step, which is a warm-up."""
    import yaml

    rows = read_metrics(run_folder)[1:]
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
    """Print the simulated step times for each setting. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.simulate", description=__doc__.split("\n")[0])
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
    headings += ["process s", "engines s", "driver's own"]
    print("".join(f"{heading:>14}" for heading in headings))
    base: float | None = None
    for engines, trainers, max_staleness in itertools.product(args.engines, args.trainers, args.max_staleness):
        scaled = replace(times, train=times.train / trainers)
        predicted = forecast(
            replace(schedule, max_staleness=max_staleness), scaled, engines=engines, concurrent=args.concurrent
        )
        base = base or predicted.step_seconds
        row = [engines, f"{trainers:g}", max_staleness, f"{predicted.step_seconds:.2f}"]
        row += [f"{base / predicted.step_seconds:.2f}"]
        row += [f"{predicted.waited:.0%}", f"{predicted.staleness_mean:.2f}", predicted.staleness_max]
        row += [f"{predicted.process_seconds:.2f}", f"{predicted.engine_seconds:.2f}", f"{predicted.driver_share:.1%}"]
        print("".join(f"{value:>14}" for value in row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
