"""What a run came to, for a caller in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Outcome of a run that came to its end. One that did not raises UserError, RunStopped or KeyboardInterrupt."""

    exit_reason: str
    """`done`, or `done early, ...` where `stop_when` ended it; as in summary.json."""
    folder: Path
    """Run folder, with metrics.jsonl, samples/ and summary.json."""
    model: Path
    """Folder of the trained model, in Hugging Face format."""
    steps_done: int
    metrics: dict[str, float]
    """Metrics of the last step."""
    before: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics of the held-out rows before training; empty without data.eval."""
    after: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics of the held-out rows after training."""
