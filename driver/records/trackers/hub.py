"""All trackers of a run as an object: metrics.jsonl written directly, others through feeders."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from core.errors import RunStopped, UserError, first_line
from core.text.atomic_write import write_whole
from core.text.json_text import decode_json
from core.timing.deadlines import TRACKER_FINISH_TIMEOUT_S
from driver.records.trackers.base import Identity, Outcome, TrackedRun, Tracker
from driver.records.trackers.feeder import Feeder
from driver.records.trackers.jsonl import FILE, Jsonl

IDENTITIES = "trackers.json"
"""File in the run folder with each tracker's id of the run."""


class Trackers:
    """Trackers of a run. Only metrics.jsonl, as part of the run folder, can stop the run."""

    def __init__(
        self,
        classes: dict[str, type[Tracker]],
        run: TrackedRun,
        *,
        previous: dict[str, Identity],
        say: Callable[[str], None],
    ):
        self.folder, self.say = run.folder, say
        self._lock = threading.Lock()
        self._identities: dict[str, Identity] = {}
        self.run = run
        # Without a thread, because metrics.jsonl is part of the run: a full disk must stop the loop.
        self.files = [cls() for cls in classes.values() if issubclass(cls, Jsonl)]
        self.feeders = [
            Feeder(name, cls(), replace(run, previous=previous.get(name)), on_start=self._remember)
            for name, cls in classes.items()
            if not issubclass(cls, Jsonl)
        ]

    def start(self) -> None:
        """Start all trackers: metrics.jsonl at once, others in their threads."""
        for file in self.files:
            file.start(self.run)
        for feeder in self.feeders:
            feeder.start()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Log a step. Raises RunStopped for a non-finite value, or if metrics.jsonl cannot be written."""
        if bad := [name for name, value in values.items() if not math.isfinite(value)]:
            before = f"; the steps before are in {self.folder / FILE}" if self.files else ""
            raise RunStopped(
                f"the metric {bad[0]} is {values[bad[0]]}: a reward, or a metric of the algorithm, is not finite"
                + before
            )
        for file in self.files:
            file.metrics(step, values)
        for feeder in self.feeders:
            feeder.metrics(step, values)
            if news := feeder.read_news():
                self.say(news)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Log some samples of a step."""
        for feeder in self.feeders:
            feeder.samples(step, rows)

    def finish(self, outcome: Outcome) -> dict[str, Any]:
        """Finish all trackers by a common deadline; report undelivered steps; return facts for summary.json."""
        for file in self.files:
            file.finish(outcome)
        deadline = time.monotonic() + TRACKER_FINISH_TIMEOUT_S
        for feeder in self.feeders:
            # All begin before the first is waited for, because the deadline is common.
            feeder.begin_finish(outcome, deadline)
        for feeder in self.feeders:
            for sentence in feeder.end_finish(deadline):
                self.say(sentence)
        return {f.name: {"lines": f.offered, "delivered": f.delivered} for f in self.feeders}

    def _remember(self, name: str, identity: Identity) -> None:
        """Write the tracker's own name of the run into trackers.json."""
        # The trackers' threads write one file.
        with self._lock:
            self._identities[name] = identity
            text = json.dumps({name: asdict(one) for name, one in self._identities.items()}, indent=1)
            write_whole(self.folder / IDENTITIES, text + "\n")


def find_previous(run_folder: Path) -> dict[str, Identity]:
    """Read trackers.json of the run to resume; empty if it had no trackers."""
    path = run_folder / IDENTITIES
    if not path.is_file():
        return {}
    try:
        given = decode_json(path.read_text(encoding="utf-8"))
        return {name: Identity(**fields) for name, fields in given.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({first_line(error)}): remove it, and the trackers begin new runs"
        ) from error
