"""Interface of trackers. Each tracker is a file, and imports its package only in `start`.

A thread per tracker (driver/records/trackers/feeder.py) calls the methods in this order: `start` once, `metrics` and
`samples` per step, `finish` once. An error is reported once. After one in `metrics` or `samples`, the call is made
again before the next. After one in `start` or at the end, or if a method hangs, `abandon` is called instead of
`finish`, and the run continues without the tracker.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from configs.tracking_schema import TrackingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Tracker's id of a run, by which a resumed run continues it. Stored in trackers.json, so it contains no secret."""

    id: str
    """Tracker's own name of the run."""
    where: str = ""
    """Store or server of this id. A resumed run with another store starts a new tracker run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Description of a run for its trackers, at the start."""

    name: str
    folder: Path
    config: dict[str, Any]
    """Whole configuration, by dotted key."""
    facts: dict[str, str]
    """Git state, package versions, hardware."""
    settings: TrackingConfig
    first_step: int
    """Completed steps of the run that this run resumes."""
    previous: Identity | None
    """Tracker's id of the resumed run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of a run."""

    exit_reason: str
    """As in summary.json: done, done early, ..., interrupted, stopped: ..., error: ..."""
    model: str | None
    """Folder of the final model; None if not saved."""

    @property
    def status(self) -> str:
        """finished, killed or failed."""
        if self.exit_reason.startswith("done"):  # also early
            return "finished"
        return "killed" if self.exit_reason == "interrupted" else "failed"


class Tracker:
    """Base of all trackers."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages to import."""
    install: ClassVar[str] = "install it"
    """How to install the packages, as a clause."""
    farewell: str = ""
    """Sentence to print after `finish`, such as the location of the data; `finish` may set it."""

    @classmethod
    def refuse(cls, settings: TrackingConfig) -> str | None:
        """Return in a sentence why the tracker cannot start on this machine; None if it can. Imports no package."""
        return None

    def start(self, run: TrackedRun) -> Identity | None:
        """Start a run or continue `run.previous`; return the identity for a resumed run."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Log a line of metrics.jsonl: of a step, or of an evaluation, which may have the number of a step."""

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Log some samples of a step: rows of equal keys, with strings and numbers."""

    def finish(self, outcome: Outcome) -> None:
        """End the run; all data must be delivered on return."""

    def abandon(self) -> None:
        """Release everything that would delay the process's exit or print at exit. Errors are ignored.

        Called only after a failure, possibly during a hanging method.
        """
