"""Thread per tracker with a bounded queue, so that a slow or failing tracker never delays the run."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from core.errors import name_error
from core.text.secrets import hide_secrets
from core.timing.deadlines import TRACKER_ABANDON_TIMEOUT_S, TRACKER_FINISH_TIMEOUT_S
from driver.records.trackers.base import Identity, Outcome, TrackedRun, Tracker

MAX_WAITING = 1000
"""Maximum number of queued calls. A call is a step's line of about 3 kB, or a table of samples."""


Call = tuple[Callable[..., None], tuple[Any, ...]]
"""Method of a tracker, and its arguments."""


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
        """Reason why the tracker was dropped, fails or is slow, as a sentence."""
        self.dropped = False
        self.offered = self.delivered = 0
        """Lines of metrics."""
        self._told = self._has_failed = False
        self._max_waiting = max_waiting
        self._undelivered: deque[Call] = deque()
        """Calls in order, of which the first failed; the thread tries them again with the next."""
        self._calls: queue.Queue[Call | None] = queue.Queue(max_waiting)
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
            if len(self._undelivered) >= self._max_waiting:
                raise queue.Full
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
                self._undelivered.append(item)
                self._deliver()
        except BaseException as error:  # a border: a package of others, with its server, may raise anything
            if len(self._undelivered) < 2:
                # since an earlier failure it has taken all that came before, so this one is news
                self._has_failed = False
            self._tell_failure("failed and gets nothing more, the run goes on without it", error)
            self.dropped = True
            self._abandon()

    def _deliver(self) -> None:
        """Make the calls that wait, in order, up to one that fails. Raises an error of the last, `finish`."""
        while self._undelivered:
            call, given = self._undelivered[0]
            try:
                call(*given)
            except Exception as error:  # a border, as in _deliver_all
                if self._undelivered[-1][0] == self.tracker.finish:
                    raise
                self._tell_failure("failed, and gets its lines again with those of the next step", error)
                return
            self._undelivered.popleft()
            self.delivered += call == self.tracker.metrics

    def _tell_failure(self, outcome: str, error: BaseException) -> None:
        """Report a failure, unless one has been. An earlier sentence, that the tracker is slow, is replaced."""
        if not self._has_failed:
            self._has_failed = True
            self.failure = f"{self.name} {outcome}: {hide_secrets(name_error(error))}"
            self._told = False

    def _abandon(self) -> None:
        with suppress(BaseException):  # a border again; that it failed has been said
            self.tracker.abandon()
