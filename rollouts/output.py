"""Pipes from a foreign process, read by a thread: the result of an agent, and the log of a process."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable

from core.text.plain_text import escape_controls
from core.timing.deadlines import AGENT_END_TIMEOUT_S
from core.timing.progress import say

LARGEST_RESULT = 2**20
"""Maximum size of an agent's result, in bytes."""
SHOWN_OF_LOG = 2**14
"""Bytes of an episode's log that are shown on standard error, in whole lines."""
KEPT_OF_LOG = 2**12
"""Bytes kept from the end of an episode's log, for its sample."""
AT_ONCE = 2**16


class Output:
    """Result and log of a process. Both are bounded, however much the agent writes."""

    def __init__(self, log: bytearray, deliver: Callable[[bytes], object] | None = None, *, whose: str = "an agent"):
        """log: receives the last KEPT_OF_LOG bytes that the process prints. deliver: takes each line of the result, in
        another thread; without it `result` keeps them. whose: name of the process for the user."""
        pipes = os.pipe(), os.pipe()
        self._result_end, self._log_end = (near for near, _ in pipes)
        self.far_ends = [far for _, far in pipes]
        """Ends for the process: of the result and of the log."""
        self.result, self.log, self.is_too_long, self._whose = b"", log, False, whose
        self.printed, self._deliver = 0, deliver
        self._shown, self._line = 0, b""
        self._stop = os.eventfd(0)
        # A thread: in the event loop, an agent that prints without end would delay every other episode. A daemon,
        # since a blocked standard error must not keep the process.
        self._thread = threading.Thread(target=self._read_all, name=f"output of {whose}", daemon=True)

    def begin(self) -> None:
        """Start reading. Only the process keeps the other ends open."""
        # an open copy here would hide the end of file
        for end in self.far_ends:
            os.close(end)
        self._thread.start()

    def show_more(self) -> None:
        """Show as many bytes of the log again, as of a new episode."""
        self._shown = 0

    async def finish(self) -> None:
        """Read the rest. To call when the processes of the episode are gone."""
        os.eventfd_write(self._stop, 1)
        # not longer: a standard error that nobody reads blocks the thread
        await asyncio.to_thread(self._thread.join, AGENT_END_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._stop)

    def _read_all(self) -> None:
        ends = {self._result_end, self._log_end}
        poll = select.poll()
        for end in (*ends, self._stop):
            poll.register(end, select.POLLIN)
        rest = 2**24 // AT_ONCE  # far more than pipes hold; a process that has escaped may go on for ever
        while ends and rest:
            ready = {end for end, _ in poll.poll()}
            is_over = self._stop in ready
            rest -= is_over
            if is_over and not ready & ends:
                break
            for end in ready & ends:
                if given := os.read(end, AT_ONCE):
                    self._take(end, given)
                else:
                    poll.unregister(end)
                    ends.discard(end)
        self._show(self._line)
        os.close(self._result_end)
        os.close(self._log_end)

    def _take(self, end: int, given: bytes) -> None:
        if end == self._log_end:
            self.printed += len(given)
            self.log += given
            del self.log[:-KEPT_OF_LOG]
            *lines, self._line = (self._line + given).split(b"\n") if self._shown < SHOWN_OF_LOG else [b""]
            for line in lines:
                self._show(line)
            if len(self._line) > SHOWN_OF_LOG:  # a line without an end
                self._show(self._line)
                self._line = b""
        elif len(self.result) + len(given) > LARGEST_RESULT:
            self.is_too_long = True  # the rest is read and discarded, or the agent would block on a full pipe
        else:
            self.result += given
        if self._deliver is not None and end != self._log_end:
            # a line that is too long is delivered in part, which is no valid message
            *lines, self.result = [self.result, b""] if self.is_too_long else self.result.split(b"\n")
            for line in lines:
                self._deliver(line)
        if self.is_too_long or self._shown >= SHOWN_OF_LOG:
            time.sleep(0.001)  # what is discarded must not cost a core

    def _show(self, line: bytes) -> None:
        """Print a line of the log, until the episode has had its share."""
        if not line or self._shown >= SHOWN_OF_LOG:
            return
        # the text is the agent's, or the policy's: what it holds must not command the terminal
        said = escape_controls(line[: SHOWN_OF_LOG - self._shown].decode(errors="backslashreplace"), keep="\t")
        self._shown += len(line) + 1
        if self._shown >= SHOWN_OF_LOG:
            said += f"\n{self._whose} has printed {SHOWN_OF_LOG} bytes: more of this episode is not shown"
        try:
            say(said)
        except OSError:  # standard error is closed or full: the agent's log is no reason to end the run
            self._shown = SHOWN_OF_LOG
