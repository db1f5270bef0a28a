"""The terminal during a run: one line per step, and below them the current phase."""

from __future__ import annotations

import rich.console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from core import metrics as names
from core.clock import Clock
from core.phases import Phase, time_metric

COLUMNS: list[tuple[str, str, str]] = [
    # heading, metric, format
    ("step", names.STEP_NUMBER, "{:.0f}"),
    ("reward", names.REWARD_MEAN, "{:.3f}"),
    ("length", names.ROLLOUT_TOKENS_MEAN, "{:.1f}"),
    ("loss", names.TRAIN_LOSS, "{:.4f}"),
    ("mismatch", names.MISMATCH_KL, "{:.1e}"),
    ("kl_ref", names.TRAIN_KL_REF, "{:.1e}"),
    ("grad", names.TRAIN_GRAD_NORM, "{:.2f}"),
    ("tok/s", names.TOKENS_PER_S, "{:.0f}"),
    ("stale", names.ROLLOUT_STALENESS_MEAN, "{:.2f}"),
    ("wait", time_metric(Phase.WAIT_FOR_DATA), "{:.1f}s"),
    ("logp", time_metric(Phase.LOGP), "{:.1f}s"),
    ("train", time_metric(Phase.TRAIN), "{:.1f}s"),
    ("sync", time_metric(Phase.SYNC), "{:.1f}s"),
    ("eng.idle", names.ENGINE_IDLE, "{:.0%}"),
    ("eval", names.EVAL_LOSS, "{:.4f}"),
]
WIDTH = 10
MAX_LINES = 60
"""Largest number of step lines; a longer run shows every second, third, ... step."""


class _Terminal(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Raise, where rich would end the process without a word."""
        raise BrokenPipeError


class Console:
    """Display of a run, to be used as a context. Without `live` only lines are printed, so that a debugger works."""

    def __init__(self, steps: int, clock: Clock, *, live: bool):
        self.terminal = _Terminal(highlight=False)
        self.is_live = live and self.terminal.is_terminal
        self.steps, self.clock = steps, clock
        self.every = -(-steps // MAX_LINES)
        self.headings: list[tuple[str, str, str]] = []
        self.steps_done = 0
        self.live = Live(self, console=self.terminal, refresh_per_second=4, transient=True)

    def __enter__(self) -> Console:
        if self.is_live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self.live.stop()

    def __rich__(self) -> Spinner:
        doing = self.clock.current_phase or "working"
        return Spinner("dots", Text(f" {doing}  ({self.steps_done} of {self.steps} steps done)", style="dim"))

    def say(self, text: str) -> None:
        self.terminal.print(text, markup=False, soft_wrap=True)

    def show_step(self, metrics: dict[str, float]) -> None:
        self.steps_done += 1
        if (
            (self.steps_done - 1) % self.every
            and self.steps_done != self.steps
            and not any(k.startswith(names.EVAL.format("")) for k in metrics)
        ):
            return
        headings = [c for c in COLUMNS if c[1] in metrics or c in self.headings]
        if headings != self.headings:  # a step may log what none before it did, such as a loss
            self.headings = headings
            self.say("".join(f"{heading:>{WIDTH}}" for heading, _, _ in self.headings))
        self.say(
            "".join(
                f"{form.format(metrics[name]) if name in metrics else '-':>{WIDTH}}" for _, name, form in self.headings
            )
        )

    def show_table(self, title: str, rows: list[tuple[str, ...]], headings: tuple[str, ...]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self.terminal.print(table)
