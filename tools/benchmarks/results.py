"""Rows of docs/results.md that are older than the code that they measure: python -m tools.benchmarks.results

For every row with a command it prints the day on which the row was last written, and how many later commits changed
what it measures (PATHS), by git. Exit code 1 if there are such commits: measure the row again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tools.benchmarks.processes import ROOT

PAGE = "docs/results.md"
COMMAND = re.compile(r"`python -m (tools\.[\w.]+)[^`]*` \|$")
SUPERVISED = ("algs", "core", "data_feeds", "driver/sl", "modeling", "trainers")
RUN = ("algs", "core", "data_feeds", "driver/rl", "modeling", "rollouts", "trainers")
PATHS = {
    "tools.benchmarks.supervised_matrix": SUPERVISED,
    "tools.benchmarks.sft_vs_trl": SUPERVISED,
    "tools.benchmarks.dpo_vs_trl": SUPERVISED,
    "tools.benchmarks.distill_cost": SUPERVISED,
    "tools.benchmarks.delta_sync": ("modeling", "trainers/weight_sync", "rollouts/engines"),
    "tools.benchmarks.estimators": ("algs",),
}
"""Folders that a row measures, by the module of its command; of other modules, those of an RL run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """Row of the page, as git knows its line."""

    name: str
    module: str
    commit: str
    """Commit that wrote the line; zeros if it is not committed."""
    written: datetime


def read_rows(blame: str) -> list[ResultRow]:
    """Read the rows with a command from the output of `git blame --line-porcelain`."""
    rows: list[ResultRow] = []
    commit, seconds = "", 0
    for line in blame.splitlines():
        if found := re.match(r"([0-9a-f]{40}) \d+ \d+", line):
            commit = found[1]
        elif line.startswith("committer-time "):
            seconds = int(line.removeprefix("committer-time "))
        # the text of the line comes last, after a tab
        elif line.startswith("\t| ") and (command := COMMAND.search(line)):
            name = line.removeprefix("\t| ").split(" | ")[0]
            written = datetime.fromtimestamp(seconds, UTC)
            rows.append(ResultRow(name=name, module=command[1], commit=commit, written=written))
    return rows


def count_later(row: ResultRow, root: Path = ROOT) -> int:
    """Count the commits after a row's own that changed what it measures."""
    if not row.commit.strip("0"):
        return 0
    paths = PATHS.get(row.module, RUN)
    return int(ask_git(root, "rev-list", "--count", "--no-merges", f"{row.commit}..HEAD", "--", *paths))


def ask_git(root: Path, *question: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *question], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    rows = read_rows(ask_git(ROOT, "blame", "--line-porcelain", PAGE))
    later = [count_later(row) for row in rows]
    for row, count in zip(rows, later, strict=True):
        print(f"{row.written:%Y-%m-%d}  {f'{count} later commits' if count else 'up to date':<18}  {row.name}")
    return int(any(later))


if __name__ == "__main__":
    sys.exit(main())
