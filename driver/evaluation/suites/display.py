"""Terminal output of an evaluation: a live table of data sets, or lines at intervals."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from rich.table import Table

from driver.evaluation.estimators import Estimate
from driver.evaluation.suites.table import MEAN, TableRow
from driver.records.console import Console

OF_MANY = ("pass^", "majority@")
"""Metrics without meaning for a single sample."""
LINES = 10
"""Number of progress lines without a terminal."""


class EvalDisplay:
    """Preliminary means by data set. They cover only finished prompts, which may be the easy ones."""

    def __init__(self, sets: Mapping[str, int], ks: Sequence[int], console: Console):
        """Start without finished prompts. sets: number of prompts by data set."""
        self.sets, self.console = sets, console
        self.shown_names = choose_columns(ks)
        self.done = dict.fromkeys(sets, 0)
        self.sums: dict[str, dict[str, float]] = {name: {} for name in sets}

    def count(self, name: str, measured: Mapping[str, float], *, quiet: bool = False) -> None:
        """Add a finished prompt of a data set."""
        self.done[name] += 1
        for metric, value in measured.items():
            self.sums[name][metric] = self.sums[name].get(metric, 0.0) + value
        done, whole = sum(self.done.values()), sum(self.sets.values())
        # True LINES times, whenever another tenth of the prompts is done.
        if not quiet and not self.console.is_live and done * LINES // whole > (done - 1) * LINES // whole:
            self.console.say(f"{done} of {whole} prompts: {MEAN} {self._total(MEAN) / done:.3f}")

    def _total(self, metric: str) -> float:
        return sum(sums.get(metric, 0.0) for sums in self.sums.values())

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show the table instead of the status line, in a terminal."""
        if self.console.is_live:
            self.console.live.update(self)
        try:
            yield
        finally:
            if self.console.is_live:
                self.console.live.update(self.console)

    def __rich__(self) -> Table:
        table = Table("data set", "prompts", *self.shown_names, title="so far", title_justify="left")
        for name, n in self.sets.items():
            done, sums = self.done[name], self.sums[name]
            means = [f"{sums[metric] / done:.3f}" if metric in sums else "-" for metric in self.shown_names]
            table.add_row(name, f"{done}/{n}", *means)
        return table


def choose_columns(ks: Sequence[int]) -> list[str]:
    """Choose the metrics to show: the mean, pass@ of the smallest k, and all metrics of the largest k.

    >>> choose_columns([1, 2, 4])
    ['mean', 'pass@1', 'pass@4', 'pass^4', 'majority@4']
    """
    least, most = ks[0], ks[-1]
    return list(dict.fromkeys([MEAN, f"pass@{least}", f"pass@{most}", *(f"{m}{most}" for m in OF_MANY if most > 1)]))


def format_table(table: Sequence[TableRow], ks: Sequence[int]) -> list[str]:
    """Format the results as lines, each mean with an interval."""
    names = choose_columns(ks)
    first = [f"{row.column}={row.value}" if row.column else row.value for row in table]
    width = max(len("prompts of"), *map(len, first))
    lines = ["".join([f"{'prompts of':<{width}}{'prompts':>9}", *(f"{name:>24}" for name in names)])]
    for name, row in zip(first, table, strict=True):
        cells = [format_estimate(row.metrics.get(metric)) for metric in names]
        lines.append("".join([f"{name:<{width}}{row.prompts:>9}", *(f"{cell:>24}" for cell in cells)]))
    return lines


def format_estimate(estimate: Estimate | None) -> str:
    """Format an estimate with its interval.

    >>> format_estimate(Estimate(value=0.5, low=0.25, high=0.75))
    '0.500 [0.250, 0.750]'
    """
    return "-" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
