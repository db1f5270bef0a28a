"""metrics.jsonl in the run folder: a line per step.

It is part of the run: each line is written before the loop continues, and a full disk stops the run.
"""

from __future__ import annotations

import errno
import json
import os

from core.errors import writing
from driver.records.trackers.base import Identity, Outcome, TrackedRun, Tracker

FILE = "metrics.jsonl"


class Jsonl(Tracker):
    """Writer of metrics.jsonl. samples/ contains the samples, with or without this tracker."""

    def start(self, run: TrackedRun) -> Identity | None:
        self.path = run.folder / FILE
        with writing(self.path):
            # Unbuffered: a line is in the file when the call returns, even if the process is killed next.
            self.file = self.path.open("ab", buffering=0)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        before = self.file.tell()
        with writing(self.path, meaning="the steps before are logged"):
            # A short write is no OSError. Half a line would make the file unreadable from there on.
            if self.file.write(line) != len(line):  # what did not fit is not an error of its own
                self.file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finish(self, outcome: Outcome) -> None:
        self.file.close()
