"""Measure seconds per phase; unexplained time is reported as `rest`.

`Clock` is for the driver, which is in one phase at a time. `ActivityTimer` is for a device.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from core.timing.phases import IDLE, REST, STEP, Activity, Phase, time_metric


class Clock:
    """Seconds per phase of the driver. Phases do not nest."""

    def __init__(self) -> None:
        self.started = self.lap_started = time.perf_counter()
        self.total: dict[str, float] = {}
        self.current: dict[str, float] = {}
        self.current_phase = ""

    @contextmanager
    def phase(self, phase: Phase) -> Generator[None]:
        """Charge the body to `phase`."""
        self.current_phase = phase
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.current[phase] = self.current.get(phase, 0.0) + spent
            self.total[phase] = self.total.get(phase, 0.0) + spent
            self.current_phase = ""

    def start_lap(self) -> dict[str, float]:
        """Return seconds per phase since the last lap, and start the next lap. With `rest` they sum to `step`."""
        now = time.perf_counter()
        whole = now - self.lap_started
        spent = self.current | {REST: whole - sum(self.current.values()), STEP: whole}
        self.lap_started, self.current = now, {}
        return {time_metric(name): seconds for name, seconds in spent.items()}

    def get_totals(self) -> dict[str, float]:
        """Return seconds per phase of the whole run. With `rest` they sum to `all`."""
        whole = time.perf_counter() - self.started
        return self.total | {REST: whole - sum(self.total.values()), "all": whole}


class Measured:
    """Context manager of `ActivityTimer.measure`: a class, since every sample enters several."""

    __slots__ = ("activity", "paused", "timer")

    def __init__(self, timer: ActivityTimer, activity: Activity, paused: Activity | None) -> None:
        self.timer, self.activity, self.paused = timer, activity, paused

    def __enter__(self) -> None:
        self.timer.switch(begun=self.activity, ended=self.paused)

    def __exit__(self, *error: object) -> None:
        self.timer.switch(begun=self.paused, ended=self.activity)


class ActivityTimer:
    """Seconds per activity on one device. Overlapping activities are charged to the first in the list."""

    def __init__(self, *activities: Activity):
        # Counts, because an engine generates many groups at once. The order of the keys is the priority.
        self.running = dict.fromkeys(activities, 0)
        self.seconds: dict[str, float] = dict.fromkeys([*activities, IDLE], 0.0)
        self.charged_until = time.perf_counter()

    def measure(self, activity: Activity, *, instead_of: Activity | None = None) -> Measured:
        """Return a context manager that charges the body to `activity`. instead_of: one that runs and pauses."""
        return Measured(self, activity, instead_of)

    def begin_activity(self, activity: Activity) -> None:
        """Charge time to `activity` until `end_activity`. An unlisted activity comes last."""
        self.switch(begun=activity, ended=None)

    def end_activity(self, activity: Activity) -> None:
        """End the activity started by `begin_activity`."""
        self.switch(begun=None, ended=activity)

    def switch(self, *, begun: Activity | None, ended: Activity | None) -> None:
        """Begin an activity, and end another."""
        # First, because the time until now belongs to the activities that have run so far.
        self._charge_elapsed()
        if begun is not None:
            self.running[begun] = self.running.get(begun, 0) + 1
            self.seconds.setdefault(begun, 0.0)
        if ended is not None:
            self.running[ended] -= 1

    def read_seconds(self) -> dict[str, float]:
        """Return seconds per activity and idle seconds since the timer was created."""
        self._charge_elapsed()
        return {str(name): seconds for name, seconds in self.seconds.items()}

    def _charge_elapsed(self) -> None:
        now = time.perf_counter()
        # Charged to one activity only, so that the seconds of a device sum to the time that passed.
        charged: str = IDLE
        for activity in self.running:  # a loop: a generator costs more than all else here
            if self.running[activity]:
                charged = activity
                break
        self.seconds[charged] += now - self.charged_until
        self.charged_until = now
