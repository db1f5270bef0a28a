"""Terminal output of a run: a line per step, and a status line below. `display` selects the amount."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from typing import Any, Literal

import rich.console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from core import metrics as names
from core.speed_metrics import TOKENS_PER_S
from core.text.plain_text import escape_controls
from core.timing.clock import Clock
from core.timing.deadlines import STEP_PROGRESS_EVERY_S
from core.timing.phases import Phase, time_metric

Display = Literal["auto", "plain", "quiet", "json"]
COLUMNS: list[tuple[str, str, str]] = [
    # heading, metric, format
    ("step", names.STEP_NUMBER, "{:.0f}"),
    ("reward", names.REWARD_MEAN, "{:.3f}"),
    ("length", names.ROLLOUT_TOKENS_MEAN, "{:.1f}"),
    ("loss", names.TRAIN_LOSS, "{:.4f}"),
    ("mismatch", names.MISMATCH_KL, "{:.1e}"),
    ("kl_ref", names.TRAIN_KL_REF, "{:.1e}"),
    ("grad", names.TRAIN_GRAD_NORM, "{:.2f}"),
    ("tok/s", TOKENS_PER_S, "{:.0f}"),
    ("stale", names.ROLLOUT_STALENESS_MEAN, "{:.2f}"),
    ("wait", time_metric(Phase.WAIT_FOR_DATA), "{:.1f}s"),
    ("logp", time_metric(Phase.LOGP), "{:.1f}s"),
    ("train", time_metric(Phase.TRAIN), "{:.1f}s"),
    ("sync", time_metric(Phase.SYNC), "{:.1f}s"),
    ("eng.idle", names.ENGINE_IDLE, "{:.0%}"),
    ("eval", names.EVAL_LOSS, "{:.4f}"),
]
LEFT = "left"
"""Heading of the last column: the remaining time, which is no metric."""
WIDTH = 10
MAX_LINES = 60
"""Maximum number of step lines; longer runs show every second, third, ... step."""
RECENT = 7
"""Steps whose median estimates the remaining time, so that single slow steps (the first) do not count."""


class _Terminal(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Raise an error; rich would exit the process silently."""
        raise BrokenPipeError


def make_terminal(display: Display) -> _Terminal:
    """Return the terminal for the lines; control characters only to a terminal, whatever FORCE_COLOR says."""
    is_plain = display != "auto" or not sys.stdout.isatty()
    return _Terminal(
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=False if is_plain else None,
        # As text on stdout: in a notebook rich would make every line an output of its own.
        force_jupyter=False,
    )


class Console:
    """Display of a run, as a context manager. Without `live` it prints only lines, so that a debugger works."""

    def __init__(self, steps: int, clock: Clock, *, live: bool, display: Display = "auto"):
        self.display: Display = display
        self.terminal = make_terminal(display)
        # A status line is redrawn in place, which a file or a dumb terminal cannot show.
        self.is_live = live and display == "auto" and self.terminal.is_terminal and not self.terminal.is_dumb_terminal
        self.steps, self.clock = steps, clock
        # Rounded up, so that there are never more than MAX_LINES lines.
        self.every = -(-steps // MAX_LINES)
        self.headings: list[str] = []
        self.steps_done = 0
        self.groups: tuple[int, int] | None = None
        """Completed and required groups of the next step; None before the first group."""
        self.tokens = 0
        """Sampled tokens since the last step."""
        self.recent: deque[float] = deque(maxlen=RECENT)
        """Seconds of the last steps."""
        self.next_progress = time.monotonic() + STEP_PROGRESS_EVERY_S
        # transient: the status line disappears at the end, and the log keeps only lines.
        self.live = Live(self, console=self.terminal, refresh_per_second=4, transient=True)

    def __enter__(self) -> Console:
        if self.is_live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self.live.stop()

    def __rich__(self) -> Spinner:
        phase = self.clock.current_phase
        doing = phase or "working"
        if phase == Phase.WAIT_FOR_DATA and self.groups is not None:
            doing += f": {self._describe_groups()}"
        left = self._describe_left()
        done = f"{self.steps_done} of {self.steps} steps done" + (f", about {left} left" if left else "")
        return Spinner("dots", Text(f" {doing}  ({done})", style="dim"))

    def say(self, text: str) -> None:
        """Print a sentence."""
        if self.display == "json":
            self._print_event("said", text=text)
        else:
            self.terminal.print(escape_controls(text, keep=""), soft_wrap=True)

    def advise(self, rule: str, text: str) -> None:
        """Print advice from a rule of driver/records/advice.py."""
        if self.display == "json":
            self._print_event("advice", rule=rule, text=text)
        else:
            self.say(f"advice: {text}")

    def show_sample(self, step: int, text: str, record: dict[str, Any]) -> None:
        """Print a sample: `text` in the terminal, `record` in JSON output."""
        if self.display == "json":
            self._print_event("sample", step=step, **record)
        elif self.display != "quiet":
            self.terminal.print(escape_controls(text), soft_wrap=True)

    def count_group(self, *, done: int, wanted: int, tokens: int) -> None:
        """Count a finished group; print progress at intervals if the output is no terminal.

        done, wanted: completed and required groups of the next step. tokens: sampled tokens of the group.
        """
        self.groups = (min(done, wanted), wanted)
        self.tokens += tokens
        if self.is_live or self.display == "quiet" or time.monotonic() < self.next_progress:
            return
        self.next_progress = time.monotonic() + STEP_PROGRESS_EVERY_S
        if self.display == "json":
            self._print_event("progress", step=self.steps_done, done=self.groups[0], wanted=wanted)
        else:
            self.say(f"step {self.steps_done}: {self._describe_groups()}")

    def show_step(self, metrics: dict[str, float]) -> None:
        """Print the line of a step."""
        self.steps_done += 1
        self.groups, self.tokens = None, 0
        self.next_progress = time.monotonic() + STEP_PROGRESS_EVERY_S
        if names.STEP_SECONDS in metrics:
            self.recent.append(metrics[names.STEP_SECONDS])
        if self.display == "json":
            self._print_event("step", metrics=metrics)
        elif self.display != "quiet" and self._is_shown(metrics):
            self._print_row(metrics)

    def _is_shown(self, metrics: dict[str, float]) -> bool:
        return (
            # An evaluation is rare and always of interest.
            (self.steps_done - 1) % self.every == 0
            or self.steps_done == self.steps
            or any(k.startswith(names.EVAL.format("")) for k in metrics)
        )

    def _print_row(self, metrics: dict[str, float]) -> None:
        cells = {heading: form.format(metrics[name]) for heading, name, form in COLUMNS if name in metrics}
        if left := self._describe_left():
            cells[LEFT] = left
        order = [*(heading for heading, _, _ in COLUMNS), LEFT]
        headings = [h for h in order if h in cells or h in self.headings]
        if headings != self.headings:  # a step may log what none before it did, such as a loss
            self.headings = headings
            self.say("".join(f"{heading:>{WIDTH}}" for heading in headings))
        self.say("".join(f"{cells.get(heading, '-'):>{WIDTH}}" for heading in headings))

    def _describe_groups(self) -> str:
        assert self.groups is not None
        seconds = time.perf_counter() - self.clock.lap_started
        # At least a millisecond, so that nothing is divided by zero.
        return f"{self.groups[0]} of {self.groups[1]} groups, {self.tokens / max(seconds, 1e-3):,.0f} tokens/s"

    def _describe_left(self) -> str:
        """Estimate the remaining time from the median of the last steps; "" before the first step."""
        if not self.recent or self.steps_done >= self.steps:
            return ""
        return format_duration(statistics.median(self.recent) * (self.steps - self.steps_done))

    def show_table(self, title: str, rows: list[tuple[str, ...]], headings: tuple[str, ...]) -> None:
        if self.display == "json":
            self._print_event("table", title=title, headings=headings, rows=rows)
            return
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*(escape_controls(cell) for cell in row))
        self.terminal.print(table)

    def _print_event(self, event: str, **given: Any) -> None:
        # soft_wrap: otherwise rich breaks the line at the terminal's width, and it is no JSON any more.
        self.terminal.print(json.dumps({"event": event, **given}), soft_wrap=True)


def format_duration(seconds: float) -> str:
    """Format seconds for people.

    >>> format_duration(8.2), format_duration(95), format_duration(4000), format_duration(200_000)
    ('8s', '1m35s', '1h06m', '2d07h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"
