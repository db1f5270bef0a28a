"""Programs that a benchmark runs in processes of their own, and the metrics of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from core.metrics import is_evaluation
from core.types.run_summary import GitState

ROOT = Path(__file__).parent.parent.parent
ROW = "row of docs/results.md: "
"""Begins the line with which a benchmark prints its result for tools/benchmarks/results.py."""


def run_for_json(command: list[str], *, cwd: Path = ROOT) -> Any:
    """Run a command and return the JSON of its last line. Its failure ends this program."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"error: {' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def shorten_commit(state: GitState, digits: int) -> str:
    """Return the beginning of the commit, with + if files have changed since."""
    return state["commit"][:digits] + ("+" if state["changed_files"] else "")


def print_row(result: str) -> None:
    """Print the result as the page of results tells it."""
    print(ROW + result, flush=True)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step of a run folder."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if not is_evaluation(line)]
