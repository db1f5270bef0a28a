"""Thread per tracker with a bounded queue, so that a slow or failing tracker never delays the run."""

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
"""Maximum number of queued calls. A call is a step's line of about 3 kB, or a table of samples."""


class Feeder:
    """Thread that calls a tracker. The driver's calls return at once, except `end_finish`."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        *,
        on_start: Callable[[str, Identity], None],
        max_waiting: int = MAX_WAITING,
    ):
        """on_start: called by the thread after the tracker has started a run."""
        self.name, self.tracker, self.run, self.on_start = name, tracker, run, on_start
        self.failure = ""
        """Reason why the tracker was dropped or is slow, as a sentence."""
        self.dropped = False
        self.offered = self.delivered = 0
        """Lines of metrics."""
        self._told = False
        self._calls: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(max_waiting)
        # a daemon: a tracker that hangs must not keep the process
        self._thread = threading.Thread(target=self._deliver_all, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Queue a line of a step or an evaluation."""
        self.offered += 1
        self._enqueue(self.tracker.metrics, step, values)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Queue samples."""
        self._enqueue(self.tracker.samples, step, rows)

    def read_news(self) -> str | None:
        """Return a new failure as a sentence, once; None otherwise."""
        if not self.failure or self._told:
            return None
        self._told = True
        return self.failure

    def begin_finish(self, outcome: Outcome, deadline: float) -> None:
        """Queue the end of the run; `deadline` is a time of time.monotonic()."""
        if not self.dropped:
            # None ends the thread, after everything queued before it.
            for call in ((self.tracker.finish, (outcome,)), None):
                try:
                    self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
                except queue.Full:
                    break

    def end_finish(self, deadline: float) -> list[str]:
        """Wait for the tracker until the deadline; return sentences to report."""
        if not self.dropped:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        said = [news] if (news := self.read_news()) else []
        if self._thread.is_alive() and not self.dropped:
            self.dropped = True
            said.append(f"{self.name} did not take everything within {TRACKER_FINISH_TIMEOUT_S:g} s of the run's end")
            # In a thread of its own, because `abandon` may hang as the call before it does.
            self._thread = threading.Thread(target=self._abandon, name=f"tracker {self.name}, abandoned", daemon=True)
            self._thread.start()
        if self.dropped:
            self._thread.join(TRACKER_ABANDON_TIMEOUT_S)
        elif self.tracker.farewell:
            said.append(self.tracker.farewell)
        # Also without a failure: a full queue loses steps.
        if lost := self.offered - self.delivered:
            said.append(f"{self.name}: {lost} of {self.offered} lines were not delivered")
        return said

    def _enqueue(self, call: Callable[..., None], *given: Any) -> None:
        if self.dropped:
            return
        try:
            # The run never waits for a tracker: what does not fit is lost, and reported.
            self._calls.put_nowait((call, given))
        except queue.Full:
            if not self.failure:
                self.failure = f"{self.name} is slower than the run: some lines are not sent to it"

    def _deliver_all(self) -> None:
        """Call the tracker until the end or an error."""
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
            # An earlier sentence, that the tracker is slow, may have been told; this one replaces it.
            self._told = False
            self._abandon()

    def _abandon(self) -> None:
        with suppress(BaseException):  # a border again; that it failed has been said
            self.tracker.abandon()
