"""What a tracker is: four methods. Each tracker is one file, and imports its package in `start` only.

All four are called by one thread of the tracker's own (driver/records/trackers/feeder.py), in this order: `start`
once, `metrics` and
`samples` per step, `finish` once. What they raise is said once, and the run continues without the tracker. Then, or
where one of them does not return, `abandon` is called in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from configs.tracking_schema import TrackingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Name of a run in its tracker, by which a resumed run continues it; in trackers.json, so it holds no secret."""

    id: str
    """The tracker's own name of the run."""
    where: str = ""
    """Store or server that knows this id; a run with another one begins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Description of a run for its trackers, when it starts."""

    name: str
    folder: Path
    config: dict[str, Any]
    """The whole configuration, by dotted key."""
    facts: dict[str, str]
    """State of git, versions of packages, hardware."""
    settings: TrackingConfig
    first_step: int
    """Steps that the run which this one resumes has done."""
    previous: Identity | None
    """The tracker's run of the run that is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of a run."""

    exit_reason: str
    """As in summary.json: done, interrupted, stopped: ..., error: ..."""
    model: str | None
    """Folder of the final model; None where it was not saved."""

    @property
    def status(self) -> str:
        """Return finished, killed or failed."""
        return {"done": "finished", "interrupted": "killed"}.get(self.exit_reason, "failed")


class Tracker(Protocol):
    """Base of all trackers."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that it imports."""
    install: ClassVar[str] = "install it"
    """How to install them, as a clause of a sentence."""
    farewell: str = ""
    """Sentence that the run says after `finish`, such as where the data is; `finish` may set it."""

    @classmethod
    def refuse(cls, settings: TrackingConfig) -> str | None:
        """Say in one sentence why it cannot start on this machine; None where it can. It imports nothing."""
        return None

    def start(self, run: TrackedRun) -> Identity | None:
        """Begin a run, or continue `run.previous`; return what a resumed run needs."""
        ...

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Take the line of metrics.jsonl of a step."""
        ...

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Take some samples of a step: rows of equal keys, each value a string or a number."""
        ...

    def finish(self, outcome: Outcome) -> None:
        """End the run; everything must be delivered when this returns."""
        ...

    def abandon(self) -> None:
        """Let go of what would keep the process or speak at its end; only after a failure, and what it raises is lost.

        It may be called beside a method that hangs.
        """
