"""Result of a run, for Python callers, summary.json and trackers."""

from __future__ import annotations

import asyncio
import bdb
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core import metrics as names
from core.errors import RunStopped, UserError
from core.text.plain_text import escape_controls
from core.text.secrets import hide_secrets
from core.text.summary import Summarized, Summary


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult(Summarized):
    """Result of a completed run. An incomplete run raises UserError, RunStopped or KeyboardInterrupt instead."""

    exit_reason: str
    """`done`, or `done early, ...` if `stop_when` ended the run; as in summary.json."""
    folder: Path
    """Run folder, with metrics.jsonl, samples/ and summary.json."""
    model: Path
    """Folder of the trained model, in Hugging Face format."""
    steps_done: int
    metrics: dict[str, float]
    """Metrics of the last step."""
    before: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics on held-out rows before training; empty without data.eval."""
    after: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics on held-out rows after training."""

    def summarize(self) -> Summary:
        """Return reward and loss of the last step, and the held-out metrics before and after, with folder and end."""
        rows = [(name, f"{a:.3f}", f"{b:.3f}", "") for name, a, b in list_held_out(self.before, self.after)]
        shown = [name for name in (names.REWARD_MEAN, names.TRAIN_LOSS) if name in self.metrics]
        rows += [(name, "", "", f"{self.metrics[name]:.3f}") for name in shown]
        lines = [f"{self.exit_reason} after {self.steps_done} steps", f"run folder: {self.folder}"]
        return Summary(lines=lines, headings=("", "before", "after", "last step"), rows=rows)


def list_held_out(before: Mapping[str, float], after: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """List the held-out metrics worth a row of a table, under their names in the log, before and after training.

    >>> before = {"reward/mean": 0.25, "reward/std": 0.1, "version": 0.0, "rollout/failed": 2.0, "loss": 1.0}
    >>> list_held_out(before, {"reward/mean": 0.5, "reward/std": 0.2, "version": 3.0, "rollout/failed": 1.0})
    [('reward/mean', 0.25, 0.5), ('rollout/failed', 2.0, 1.0)]
    >>> list_held_out({"rollout/failed": 2.0}, {"rollout/failed": 0.0})
    []
    """
    hidden = {names.REWARD_STD, names.VERSION, *([] if after.get(names.ROLLOUT_FAILED) else [names.ROLLOUT_FAILED])}
    return [(name, before[name], after[name]) for name in before if name in after and name not in hidden]


def name_start(when: str, steps_done: int) -> str:
    """Return the name of an evaluation; `before` becomes `after step 990` in a run that is resumed there."""
    return f"after step {steps_done}" if when == "before" and steps_done else when


def make_result(reason: str, folder: Path, facts: Mapping[str, Any], metrics: dict[str, float]) -> RunResult:
    """Create the result of a completed run. facts: contents of summary.json. metrics: of the last step."""
    return RunResult(
        exit_reason=reason,
        folder=folder,
        model=folder / "model",
        steps_done=facts.get("steps_done", 0),
        metrics=metrics,
        before=facts.get("before", {}),
        after=facts.get("after", {}),
    )


def name_end(error: BaseException | None, *, early: str = "") -> str:
    """Return the exit reason for summary.json and the trackers; None means a completed run.

    early: why a completed run ended early.
    """
    match error:
        case None:
            return f"done early, {early}" if early else "done"
        case KeyboardInterrupt() | asyncio.CancelledError():
            return "interrupted"
        case bdb.BdbQuit():
            return "interrupted in the debugger"
        case RunStopped() | UserError():
            # An error may quote an address with its password, or escapes, and this text goes to files and trackers.
            return f"stopped: {_quote(error)}"
        case _:
            return f"error: {type(error).__name__}: {_quote(error)}"


def _quote(error: BaseException) -> str:
    return escape_controls(hide_secrets(str(error)), keep="")
