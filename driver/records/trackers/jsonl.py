"""metrics.jsonl in the run folder: a line per step.

It is part of the run: each line is written before the loop continues, and a full disk stops the run.
"""

from __future__ import annotations

import json

from core.errors import writing
from core.text.atomic_write import append_lines
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
        with writing(self.path, meaning="the steps before are logged", needs=lambda: len(line)):
            append_lines(self.file, line)

    def finish(self, outcome: Outcome) -> None:
        self.file.close()
