"""Seconds of every device by activity. Unmeasured time is a row of its own, so that the rows sum to the total.

Engines' seconds are measured in rollouts/worker.py, trainer ranks' in trainers/trainer.py. The driver knows why a
device is idle. A trainer waits for data or for the driver (packing, logging, the engines' part of a weight sync). An
engine waits for the trainer if the schedule permits no new groups.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from core.cluster.workers import Workers
from core.metrics import DEVICE_SECONDS, IDLE_FRACTION
from core.tasks import start_task
from core.timing.clock import ActivityTimer, Clock
from core.timing.phases import ENGINE_TURNS, IDLE, REST, TRAINER_TURNS, Activity, Phase
from driver.records.engine_timers import EngineTimers, Seconds
from trainers.trainer import Trainer

NOTABLE_FRACTION = 0.1
"""Minimum fraction of the time to be reported as a bottleneck."""
TOLD_FRACTION = 0.0005
"""Fraction up to which environment time is omitted, because without tools it is nearly zero."""


@dataclass
class TimeBreakdown:
    """Seconds of every device from `start` to `read_totals`."""

    clock: Clock
    trainers: Workers[Trainer]
    engines: EngineTimers
    opening: dict[str, Seconds]
    """Seconds of every device, and of the driver ("driver"), at the start."""
    lap_at: dict[str, Seconds]
    prefetched: asyncio.Task[dict[int, Seconds]] | None = None
    """Request of the engines' timers for the next lap."""
    prefetched_trainers: asyncio.Task[list[Seconds]] | None = None
    """Request of the trainers' timers for the next lap."""

    @staticmethod
    async def start(clock: Clock, *, trainers: Workers[Trainer], engines: EngineTimers) -> TimeBreakdown:
        breakdown = TimeBreakdown(clock, trainers, engines, {}, {})
        breakdown.opening = breakdown.lap_at = await breakdown._read_devices()
        clock.start_lap()
        return breakdown

    def prefetch_engine_timers(self) -> None:
        """Request the engines' timers now, so that the next `start_lap` does not wait for a busy engine."""
        self.prefetched = start_task(self.engines.read())

    def prefetch_trainer_timers(self) -> None:
        """Request the trainers' timers after a step's updates; the weight sync belongs to the next lap.

        Otherwise a lap would wait for them while the next groups are requested, and count that time itself.
        """
        self.prefetched_trainers = start_task(self._read_trainers())

    async def start_lap(self) -> dict[str, float]:
        """Return seconds since the last lap of the mean engine and mean trainer rank, and their idle fractions.

        An engine that joined in this lap counts from the next lap on.
        """
        now = await self._read_devices()
        since = {device: subtract_seconds(now[device], self.lap_at[device]) for device in now if device in self.lap_at}
        self.lap_at = now
        numbers: dict[str, float] = {}
        for kind in ("trainer", "engine"):
            mean = average_device(kind, since)
            numbers |= {DEVICE_SECONDS.format(kind, name): value for name, value in mean.items()}
            numbers[IDLE_FRACTION.format(kind)] = mean[IDLE] / sum(mean.values())
        return numbers

    async def summarize(self, *, may_overlap: bool, is_colocated: bool) -> dict[str, Any]:
        """Return facts on the whole run: seconds by device, and a sentence on the bottleneck.

        may_overlap: whether engines and trainers could work at the same time, and do not.
        """
        devices = await self.read_totals()
        name = describe_colocation_cost if is_colocated else partial(name_bottleneck, may_overlap=may_overlap)
        return {"devices": devices, "bottleneck": name(devices)}

    async def read_totals(self) -> dict[str, Seconds]:
        """Return seconds since the start by device and activity. Each device's seconds sum to the wall clock's."""
        now = await self._read_devices()
        since = {device: subtract_seconds(now[device], self.opening.get(device, {})) for device in now}
        driver = since.pop("driver")
        return {
            device: explain_trainer(seconds, driver)
            if device.startswith("trainer")
            else explain_engine(seconds, driver)
            for device, seconds in since.items()
        }

    async def _read_devices(self) -> dict[str, Seconds]:
        of_engines, self.prefetched = self.prefetched, None
        of_trainers, self.prefetched_trainers = self.prefetched_trainers, None
        engines = await (of_engines or self.engines.read())
        trainers = await (of_trainers or self._read_trainers())
        return {
            "driver": self.clock.get_totals(),
            **{f"trainer {i}": seconds for i, seconds in enumerate(trainers)},
            **{f"engine {rank}": seconds for rank, seconds in engines.items()},
        }

    async def _read_trainers(self) -> list[Seconds]:
        return await self.trainers.attribute("timer").call_all(ActivityTimer.read_seconds)


def subtract_seconds(now: Seconds, then: Seconds) -> Seconds:
    return {name: value - then.get(name, 0.0) for name, value in now.items()}


def average_device(kind: str, devices: dict[str, Seconds]) -> Seconds:
    """Return the seconds of the mean device of a kind: trainer or engine."""
    of_kind = [seconds for device, seconds in devices.items() if device.startswith(kind)]
    listed = dict.fromkeys(name for seconds in of_kind for name in seconds)  # one that left at once has fewer
    return {name: sum(d.get(name, 0.0) for d in of_kind) / len(of_kind) for name in listed}


def explain_trainer(seconds: Seconds, driver: Seconds) -> Seconds:
    """Split a trainer rank's idle time by the driver's activity."""
    busy = {name: value for name, value in seconds.items() if name != IDLE}
    # By the driver's clock, so that the rows of every device sum to the same total.
    idle = driver["all"] - sum(busy.values())
    waits, evaluates = driver.get(Phase.WAIT_FOR_DATA, 0.0), driver.get(Phase.EVALUATE, 0.0)
    # The driver's remaining phases: packing, logging, the engines' part of a weight sync.
    other = idle - waits - evaluates - driver[REST]
    return busy | {str(Phase.WAIT_FOR_DATA): waits, str(Phase.EVALUATE): evaluates, "driver": other, REST: driver[REST]}


def explain_engine(seconds: Seconds, driver: Seconds) -> Seconds:
    """Rename an engine's idle time to wait_for_trainer; `rest` is the difference of engine's and driver's clock."""
    named = {("wait_for_trainer" if name == IDLE else name): value for name, value in seconds.items()}
    return named | {REST: driver["all"] - sum(named.values())}


def describe_shares(devices: dict[str, Seconds]) -> list[str]:
    """Return a line for the mean trainer rank and a line for the mean engine, as fractions of the time."""
    lines: list[str] = []
    for kind in ("trainer", "engine"):
        mean = average_device(kind, devices)
        shares = {name: value / sum(mean.values()) for name, value in mean.items() if value}
        told = {name: share for name, share in shares.items() if name != Activity.ENVIRONMENT or share > TOLD_FRACTION}
        parts = ", ".join(f"{name.replace('_', ' ')} {share:z.1%}" for name, share in told.items())
        lines.append(f"{kind}s: {parts}")
    return lines


def describe_colocation_cost(devices: dict[str, Seconds]) -> str:
    """Return a sentence on a colocated device: use by trainer and engine, and cost of switching."""
    trainer, engine = average_device("trainer", devices), average_device("engine", devices)
    whole = sum(trainer.values())
    changes = sum(trainer.get(name, 0.0) for name in TRAINER_TURNS) + sum(
        engine.get(name, 0.0) for name in ENGINE_TURNS
    )
    trains = sum(trainer.get(name, 0.0) for name in (Activity.TRAIN, Activity.LOGP))
    generates = sum(engine.get(name, 0.0) for name in (Activity.GENERATE, Activity.ENVIRONMENT, Activity.REWARD))
    return (
        f"one device for both: {trains / whole:.0%} of the time for training, {generates / whole:.0%} for generation, "
        f"{engine[Activity.SYNC] / whole:.0%} for weight sync, {changes / whole:.0%} to change hands"
    )


def name_bottleneck(devices: dict[str, Seconds], *, may_overlap: bool) -> str:
    """Return a sentence on the run's bottleneck, from the seconds of the mean trainer and engine.

    may_overlap: as in `summarize`. In one process, nothing works at the same time.
    """
    trainer, engine = average_device("trainer", devices), average_device("engine", devices)
    trainer_waits = trainer[Phase.WAIT_FOR_DATA] / sum(trainer.values())
    engine_waits = engine["wait_for_trainer"] / sum(engine.values())
    syncs = engine[Activity.SYNC] / sum(engine.values())
    said = f"trainers waited for data {trainer_waits:.0%} of the time, engines for the trainer {engine_waits:.0%}"
    # Trainers are idle while engines finish a weight sync. That part is no work of the driver's.
    others_sync = max(engine[Activity.SYNC] - trainer[Activity.SYNC], 0.0)
    driver = (trainer["driver"] - others_sync) / sum(trainer.values())
    if driver > max(syncs, trainer_waits, engine_waits, NOTABLE_FRACTION):
        return f"the driver's own work is the bottleneck ({driver:.0%} of the trainers' time): {said}"
    if syncs > max(trainer_waits, engine_waits, NOTABLE_FRACTION):
        return f"weight sync is the bottleneck ({syncs:.0%} of the engines' time): {said}"
    rewards, environment, generation = (
        engine.get(activity, 0.0) / sum(engine.values())
        for activity in (Activity.REWARD, Activity.ENVIRONMENT, Activity.GENERATE)
    )
    if trainer_waits > NOTABLE_FRACTION and rewards > max(generation, environment, engine_waits):
        return (
            f"the rewards are the bottleneck: {said}, and {rewards:.0%} of the engines' time nothing was sampled while "
            "samples waited for theirs; a faster reward would help, or more reward.workers (of async functions, "
            "reward.max_concurrency)"
        )
    if min(trainer_waits, engine_waits) > NOTABLE_FRACTION and may_overlap:
        return f"each side waits for the other: {said}; max_staleness=1 lets them work at the same time"
    if max(trainer_waits, engine_waits) <= NOTABLE_FRACTION:
        return f"neither side is the bottleneck: {said}"
    if trainer_waits > engine_waits and environment > generation:
        return (
            f"the environment is the bottleneck: {said}, and {environment:.0%} of the engines' time no episode was "
            "sampled while some waited for tools; faster tools would help, or more groups at once (groups_per_step)"
        )
    if trainer_waits > engine_waits:
        return f"generation is the bottleneck: {said}; more or faster engines would help"
    return f"training is the bottleneck: {said}; more or faster trainer ranks would help"
