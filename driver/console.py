"""What the terminal shows while a run goes: one line per step, and below them the phase of the moment."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from core.clock import Clock

COLUMNS: list[tuple[str, str, str]] = [
    # heading, metric, format
    ("step", "step", "{:.0f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("length", "rollout/tokens_mean", "{:.1f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("mismatch", "train/mismatch/kl", "{:.1e}"),
    ("kl", "train/kl_ref", "{:.1e}"),
    ("grad", "train/grad_norm", "{:.2f}"),
    ("tok/s", "tokens_per_s", "{:.0f}"),
    ("lag", "rollout/lag_mean", "{:.2f}"),
    ("wait", "time/wait_for_data_s", "{:.1f}s"),
    ("logp", "time/logp_s", "{:.1f}s"),
    ("train", "time/train_s", "{:.1f}s"),
    ("sync", "time/sync_s", "{:.1f}s"),
    ("eng.idle", "time/engines/idle_share", "{:.0%}"),
    ("eval", "eval/loss", "{:.4f}"),
]
WIDTH = 10
MOST_LINES = 60
"""A longer run shows every second, third, ... step; metrics.jsonl has all of them."""


class Progress:
    """Use as a context. `live` is off where a debugger may want the terminal; then the lines alone are printed."""

    def __init__(self, steps: int, clock: Clock, *, live: bool):
        self.console = Console(highlight=False)
        self.is_live = live and self.console.is_terminal
        self.steps, self.clock = steps, clock
        self.every = -(-steps // MOST_LINES)
        self.headings: list[tuple[str, str, str]] = []
        self.done = 0
        self.live = Live(self, console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        if self.is_live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self.live.stop()

    def __rich__(self) -> Spinner:
        doing = self.clock.phase_now or "working"
        return Spinner("dots", Text(f" {doing}  ({self.done} of {self.steps} steps done)", style="dim"))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, metrics: dict[str, float]) -> None:
        self.done += 1
        if (self.done - 1) % self.every and self.done != self.steps and not any(k.startswith("eval/") for k in metrics):
            return
        if not self.headings:
            self.headings = [c for c in COLUMNS if c[1] in metrics]
            self.say("".join(f"{heading:>{WIDTH}}" for heading, _, _ in self.headings))
        self.say(
            "".join(
                f"{form.format(metrics[name]) if name in metrics else '-':>{WIDTH}}" for _, name, form in self.headings
            )
        )

    def table(self, title: str, rows: list[tuple[str, ...]], headings: tuple[str, ...]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
