"""One thread per tracker, with a bounded queue: a tracker that is slow or fails costs the run nothing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from core.errors import name_error
from core.text.secrets import hide_secrets
from core.timing.deadlines import TRACKER_ABANDON_TIMEOUT_S, TRACKER_FINISH_TIMEOUT_S
from driver.records.trackers.base import Identity, Outcome, TrackedRun, Tracker

MAX_WAITING = 1000
"""Calls that may wait for a tracker. A call is a step's line, about 3 kB, or a table of samples."""


class Feeder:
    """Thread that feeds one tracker. Its methods are called by the driver, and return at once, but `finish`."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        *,
        on_start: Callable[[str, Identity], None],
        max_waiting: int = MAX_WAITING,
    ):
        """on_start: called by the thread when the tracker has begun a run."""
        self.name, self.tracker, self.run, self.on_start = name, tracker, run, on_start
        self.failure = ""
        """Reason why the tracker was dropped, or behaves badly: one sentence."""
        self.dropped = False
        self.offered = self.delivered = 0
        """Steps."""
        self._told = False
        self._calls: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(max_waiting)
        # a daemon: a tracker that hangs must not keep the process
        self._thread = threading.Thread(target=self._deliver_all, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Let the tracker take a step's line, now or later."""
        self.offered += 1
        self._enqueue(self.tracker.metrics, step, values)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Let the tracker take some samples, now or later."""
        self._enqueue(self.tracker.samples, step, rows)

    def read_news(self) -> str | None:
        """Return the sentence about a failure, once; None where there is nothing new."""
        if not self.failure or self._told:
            return None
        self._told = True
        return self.failure

    def begin_finish(self, outcome: Outcome, deadline: float) -> None:
        """Let the tracker end its run after all that waits; `deadline` is a time of time.monotonic()."""
        if not self.dropped:
            for call in ((self.tracker.finish, (outcome,)), None):
                try:
                    self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
                except queue.Full:
                    break

    def end_finish(self, deadline: float) -> list[str]:
        """Wait for the tracker until the deadline; return what there is to say."""
        if not self.dropped:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        said = [news] if (news := self.read_news()) else []
        if self._thread.is_alive() and not self.dropped:
            self.dropped = True
            said.append(f"{self.name} did not take everything within {TRACKER_FINISH_TIMEOUT_S:g} s of the run's end")
            self._thread = threading.Thread(target=self._abandon, name=f"tracker {self.name}, abandoned", daemon=True)
            self._thread.start()
        if self.dropped:
            self._thread.join(TRACKER_ABANDON_TIMEOUT_S)
        elif self.tracker.farewell:
            said.append(self.tracker.farewell)
        if lost := self.offered - self.delivered:
            said.append(f"{self.name}: {lost} of {self.offered} steps were not delivered")
        return said

    def _enqueue(self, call: Callable[..., None], *given: Any) -> None:
        if self.dropped:
            return
        try:
            self._calls.put_nowait((call, given))
        except queue.Full:
            if not self.failure:
                self.failure = f"{self.name} is slower than the run: some steps are not sent to it"

    def _deliver_all(self) -> None:
        """Call the tracker until the end, or until it fails."""
        try:
            identity = self.tracker.start(self.run)
            if identity is not None:
                self.on_start(self.name, identity)
            while (item := self._calls.get()) is not None:
                call, given = item
                call(*given)
                self.delivered += call == self.tracker.metrics
        except BaseException as error:  # a border: a package of others, with its server, may raise anything
            self.dropped = True
            self.failure = (
                f"{self.name} failed and gets nothing more, the run goes on without it: "
                f"{hide_secrets(name_error(error))}"
            )
            self._told = False
            self._abandon()

    def _abandon(self) -> None:
        with suppress(BaseException):  # a border again; that it failed has been said
            self.tracker.abandon()
