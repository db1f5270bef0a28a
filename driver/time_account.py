"""Where every device's seconds went, closed: what nobody measured is a row of its own.

An engine's seconds are measured beside it, in rollouts/worker.py; a trainer rank's in trainers/trainer.py. What a
device calls idle the driver knows the reason of: a trainer waits for data, or for the driver's own work (packing,
logging, the engines' part of a sync); an engine waits for the trainer, because the schedule lets it start nothing
more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from core.clock import Clock
from core.workers import Workers

Seconds = dict[str, float]
WORTH_NAMING = 0.1
"""A share of the time that is less is no bottleneck."""


@dataclass
class Account:
    """From `opened` to `close`."""

    clock: Clock
    trainers: Workers
    engines: Workers
    opening: dict[str, Seconds]
    """Of every device and of the driver ("driver"), when the account was opened."""
    lap_at: dict[str, Seconds]
    asked: asyncio.Task[list[Seconds]] | None = None
    """What the engines were asked for and `lap` has not told."""

    @staticmethod
    async def opened(clock: Clock, *, trainers: Workers, engines: Workers) -> Account:
        account = Account(clock, trainers, engines, {}, {})
        account.opening = account.lap_at = await account._read()
        clock.lap()
        return account

    def ask_engines(self) -> None:
        """For their seconds, to be told by the next `lap`: an engine that has much to do may take a second to answer,
        for which nobody should wait."""
        self.asked = asyncio.create_task(self.engines.all("ledger.read"))
        self.asked.add_done_callback(lambda task: task.cancelled() or task.exception())  # `lap` raises it, if it comes

    async def lap(self) -> dict[str, float]:
        """For the log: the mean engine's and the mean trainer rank's seconds since the last lap, and idle shares."""
        now = await self._read()
        since = {device: less(now[device], self.lap_at[device]) for device in now}
        self.lap_at = now
        numbers: dict[str, float] = {}
        for kind in ("trainer", "engine"):
            mean = mean_of(kind, since)
            numbers |= {f"time/{kind}s/{name}_s": value for name, value in mean.items()}
            numbers[f"time/{kind}s/idle_share"] = mean["idle"] / sum(mean.values())
        return numbers

    async def close(self) -> dict[str, Seconds]:
        """Seconds by device and activity since the opening; each device's add up to the wall clock's."""
        now = await self._read()
        since = {device: less(now[device], self.opening[device]) for device in now}
        driver = since.pop("driver")
        return {
            device: of_trainer(seconds, driver) if device.startswith("trainer") else of_engine(seconds, driver)
            for device, seconds in since.items()
        }

    async def _read(self) -> dict[str, Seconds]:
        asked, self.asked = self.asked, None
        engines = await (asked or self.engines.all("ledger.read"))
        trainers = await self.trainers.all("ledger.read")
        return {
            "driver": self.clock.totals(),
            **{f"trainer {i}": seconds for i, seconds in enumerate(trainers)},
            **{f"engine {i}": seconds for i, seconds in enumerate(engines)},
        }


def less(now: Seconds, then: Seconds) -> Seconds:
    return {name: value - then.get(name, 0.0) for name, value in now.items()}


def mean_of(kind: str, devices: dict[str, Seconds]) -> Seconds:
    """The seconds of the mean device whose name begins so."""
    of_kind = [seconds for device, seconds in devices.items() if device.startswith(kind)]
    return {name: sum(d[name] for d in of_kind) / len(of_kind) for name in of_kind[0]}


def of_trainer(seconds: Seconds, driver: Seconds) -> Seconds:
    """A trainer rank is idle while the driver waits for groups, does something else, or does nothing that it names."""
    busy = {name: value for name, value in seconds.items() if name != "idle"}
    idle = driver["all"] - sum(busy.values())
    waits, evaluates = driver.get("wait_for_data", 0.0), driver.get("evaluate", 0.0)
    other = idle - waits - evaluates - driver["rest"]
    return busy | {"wait_for_data": waits, "evaluate": evaluates, "driver": other, "rest": driver["rest"]}


def of_engine(seconds: Seconds, driver: Seconds) -> Seconds:
    """An engine is idle only where it has nothing to do; `rest` is what two clocks disagree about."""
    named = {("wait_for_trainer" if name == "idle" else name): value for name, value in seconds.items()}
    return named | {"rest": driver["all"] - sum(named.values())}


def shares(devices: dict[str, Seconds]) -> list[str]:
    """One line on the mean trainer rank and one on the mean engine, in shares of the time."""
    lines: list[str] = []
    for kind in ("trainer", "engine"):
        mean = mean_of(kind, devices)
        parts = ", ".join(f"{name.replace('_', ' ')} {value / sum(mean.values()):.1%}" for name, value in mean.items())
        lines.append(f"{kind}s: {parts}")
    return lines


def bottleneck(devices: dict[str, Seconds], *, max_lag: int) -> str:
    """One sentence on what holds the run up, from the mean trainer's and the mean engine's seconds."""
    trainer, engine = mean_of("trainer", devices), mean_of("engine", devices)
    trainer_waits = trainer["wait_for_data"] / sum(trainer.values())
    engine_waits = engine["wait_for_trainer"] / sum(engine.values())
    syncs = engine["sync"] / sum(engine.values())
    said = f"trainers waited for data {trainer_waits:.0%} of the time, engines for the trainer {engine_waits:.0%}"
    others_sync = max(engine["sync"] - trainer["sync"], 0.0)
    driver = (trainer["driver"] - others_sync) / sum(trainer.values())
    if driver > max(syncs, trainer_waits, engine_waits, WORTH_NAMING):
        return f"the driver's own work is the bottleneck ({driver:.0%} of the trainers' time): {said}"
    if syncs > max(trainer_waits, engine_waits, WORTH_NAMING):
        return f"the sync of weights is the bottleneck ({syncs:.0%} of the engines' time): {said}"
    if min(trainer_waits, engine_waits) > WORTH_NAMING and max_lag == 0:
        return f"each side waits for the other: {said}; max_lag=1 lets them work at the same time"
    if max(trainer_waits, engine_waits) <= WORTH_NAMING:
        return f"neither side is the bottleneck: {said}"
    if trainer_waits > engine_waits:
        return f"generation is the bottleneck: {said}; more or faster engines would help"
    return f"training is the bottleneck: {said}; more or faster trainer ranks would help"
