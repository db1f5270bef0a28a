"""Rows of docs/results.md that are older than the code that they measure: python -m tools.benchmarks.results [--write]

For every row with a command it prints the day on which the row was last written, and how many later commits changed
what it measures (PATHS), by git. Exit code 1 if there are such commits: measure the row again.

--write measures the speeds: it runs the commands of the rows of SPEEDS as they stand on the page, one after another,
and writes what they print (`print_row`) into the page, with the commit, and into README. Names after it measure theirs
alone. The machine should do nothing else for about an hour.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from driver.records.git_state import read_git_state
from tools.benchmarks.processes import ROOT, ROW, shorten_commit

PAGE = "docs/results.md"
COMMAND = re.compile(r"`python -m (tools\.[\w.]+)[^`]*` \|$")
MODULES = "tools.benchmarks."
SPEEDS = (
    *("sample_cost", "rl_vs_trl", "sft_vs_trl", "dpo_vs_trl"),
    *("driver_cost", "distill_cost", "delta_sync", "overlap", "data_size"),
)
"""Benchmarks that print their row."""
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
    """Count the commits after a row's own that changed what it measures, but for its pages."""
    if not row.commit.strip("0"):
        return 0
    paths = PATHS.get(row.module, RUN)
    return int(ask_git(root, "rev-list", "--count", "--no-merges", f"{row.commit}..HEAD", "--", *paths, ":!*.md"))


def ask_git(root: Path, *question: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *question], capture_output=True, text=True, check=True
    ).stdout.strip()


def measure(command: str) -> str:
    """Run the command of a row, pass on what it prints, and return the result for the row."""
    words = [sys.executable, *shlex.split(command)[1:]]
    found = ""
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(ROW):
                found = line.removeprefix(ROW).strip()
    # exit code 1 is a missed goal, which is a result, too
    if process.returncode not in (0, 1) or not found:
        raise SystemExit(f"error: {command} ended with exit code {process.returncode}, its row: {found or 'none'}")
    return found


def write_row(text: str, command: str, result: str) -> str:
    """Return the page with another result in the row of a command."""
    row = re.compile(rf"^(\| [^|]+ \| )[^|]+( \| `{re.escape(command)}` \|)$", re.MULTILINE)
    return row.sub(lambda found: found[1] + result + found[2], text)


def measure_speeds(names: Sequence[str]) -> None:
    """Measure the rows of benchmarks, and write each into the pages when it is done."""
    page = ROOT / PAGE
    # before the first row is written, which changes a file
    state = read_git_state()
    if isinstance(state, str):
        raise SystemExit(f"error: the commit is {state}, and the rows name it")
    commit = shorten_commit(state, 8)
    commands = [found[0].strip("` |") for line in page.read_text().splitlines() if (found := COMMAND.search(line))]
    for command in [command for name in names for command in commands if command.split()[2] == MODULES + name]:
        result = measure(command)
        page.write_text(write_row(page.read_text(), command, f"{result} (`{commit}`)"))
        readme = ROOT / "README.md"
        readme.write_text(write_row(readme.read_text(), command, result))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.results", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--write", nargs="*", choices=SPEEDS, metavar="NAME", help="measure, and write the rows")
    args = parser.parse_args()
    if args.write is not None:
        measure_speeds(args.write or SPEEDS)
        return 0
    rows = read_rows(ask_git(ROOT, "blame", "--line-porcelain", PAGE))
    later = [count_later(row) for row in rows]
    for row, count in zip(rows, later, strict=True):
        print(f"{row.written:%Y-%m-%d}  {f'{count} later commits' if count else 'up to date':<18}  {row.name}")
    return int(any(later))


if __name__ == "__main__":
    sys.exit(main())
