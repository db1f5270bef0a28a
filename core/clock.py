"""Where the seconds go: phases measured where they happen, and what is left over as its own row.

`Clock` is the driver's, which does one thing at a time; `Ledger` is a device's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """Phases do not nest. `lap` gives the phases since the last lap, with `rest` so that they add up to `step`."""

    def __init__(self) -> None:
        self.started = self.lap_started = time.perf_counter()
        self.total: dict[str, float] = {}
        self.current: dict[str, float] = {}
        self.phase_now = ""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        self.phase_now = name
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.current[name] = self.current.get(name, 0.0) + spent
            self.total[name] = self.total.get(name, 0.0) + spent
            self.phase_now = ""

    def lap(self) -> dict[str, float]:
        now = time.perf_counter()
        whole = now - self.lap_started
        parts = self.current | {"rest": whole - sum(self.current.values()), "step": whole}
        self.lap_started, self.current = now, {}
        return {f"time/{name}_s": seconds for name, seconds in parts.items()}

    def totals(self) -> dict[str, float]:
        """Seconds of every phase of the run, with `rest`, adding up to `all`."""
        whole = time.perf_counter() - self.started
        return self.total | {"rest": whole - sum(self.total.values()), "all": whole}


class Ledger:
    """What one device does, moment by moment. Of what goes on at once the activity named first counts."""

    def __init__(self, *activities: str):
        self.going = dict.fromkeys(activities, 0)
        self.seconds = dict.fromkeys([*activities, "idle"], 0.0)
        self.settled = time.perf_counter()

    @contextmanager
    def doing(self, activity: str) -> Generator[None]:
        self.begin(activity)
        try:
            yield
        finally:
            self.end(activity)

    def begin(self, activity: str) -> None:
        self._settle()
        self.going[activity] += 1

    def end(self, activity: str) -> None:
        self._settle()
        self.going[activity] -= 1

    def read(self) -> dict[str, float]:
        """Seconds of every activity, and idle, since the ledger was made."""
        self._settle()
        return dict(self.seconds)

    def _settle(self) -> None:
        now = time.perf_counter()
        at = next((name for name, n in self.going.items() if n), "idle")
        self.seconds[at] += now - self.settled
        self.settled = now


async def in_time(call: Awaitable[T], seconds: float) -> T | None:
    """What `call` brings, None where it takes longer: it is cancelled then. A TimeoutError of its own is raised."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await call
    except TimeoutError:
        if deadline.expired():
            return None
        raise
