"""Report slow work on stderr, rarely enough to keep a log file short."""

from __future__ import annotations

import sys
import time

from core.text.plain_text import print_line
from core.timing.deadlines import PROGRESS_EVERY_S


def say(text: str) -> None:
    """Print one line on stderr and flush it."""
    print_line(text, keep="\n", file=sys.stderr)


class Progress:
    """Lines such as `data.train: 30,000 of 100,000 rows read`, one every PROGRESS_EVERY_S seconds."""

    def __init__(self, what: str, total: int, unit: str = "rows read"):
        self.what, self.total, self.unit = what, total, unit
        self.next_line = time.monotonic() + PROGRESS_EVERY_S

    def show(self, done: int) -> None:
        """Print how far it is, if the last line is old enough."""
        if time.monotonic() >= self.next_line:
            say(f"{self.what}: {done:,} of {self.total:,} {self.unit}")
            self.next_line = time.monotonic() + PROGRESS_EVERY_S
