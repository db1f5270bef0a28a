"""Sweeps: `trainer.lr=1e-5,3e-5 seed=0,1` runs every combination, in sequence, each in a separate process.

Commas outside brackets, braces and quotes separate values. Write a list as [0.9,0.95], and text with a comma in quotes.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from core import metrics as names
from core.cluster.signals import EXIT_CODE
from core.errors import UserError, writing
from core.text.atomic_write import write_whole
from core.text.plain_text import print_line
from driver.checks.explain import explain
from driver.load_recipe import load_recipe
from driver.records.run_folder import CONFIG, make_folder

NOT_SWEPT = ("run_dir", "resume")
"""Keys that must be equal in all runs of a sweep."""
SHOWN = (
    ("reward", names.REWARD_MEAN),
    ("loss", names.TRAIN_LOSS),
    ("held-out reward", names.EVAL.format(names.REWARD_MEAN)),
    ("held-out loss", names.EVAL_LOSS),
)
"""Columns of the table: metric of the last step, or of the final evaluation."""


def combine_overrides(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every combination, with the last key changing fastest; a single entry without a sweep.

    >>> combine_overrides(["lr=1,2", "betas=[0.9,0.95]", "seed=0,1"])[1]
    ['lr=1', 'betas=[0.9,0.95]', 'seed=1']
    """
    choices: list[list[str]] = []
    for item in overrides:
        key, equals, value = item.partition("=")
        values = split_values(value)
        if len(values) > 1 and not all(values):
            raise UserError(f"override {item!r:.200}: a value between two commas is empty")
        choices.append([f"{key}={one}" for one in values] if equals and len(values) > 1 else [item])
    return [list(combination) for combination in itertools.product(*choices)]


def split_values(text: str) -> list[str]:
    """Split text at commas outside brackets, braces and quotes.

    >>> split_values("[0.9,0.95],[0.9,0.99]"), split_values("'a,b'"), split_values("1")
    (['[0.9,0.95]', '[0.9,0.99]'], ["'a,b'"], ['1'])
    """
    # begin: a value, or an item inside brackets, begins here, so that a quote would open a text
    values, depth, quote, begin = [""], 0, "", True
    for i, char in enumerate(text):
        if quote:
            # In YAML only double quotes know a backslash as an escape.
            is_escaped = quote == '"' and text[:i].endswith("\\")
            quote = "" if char == quote and not is_escaped else quote
        elif char in "'\"" and begin:  # a quote within a word is an apostrophe
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            values.append("")
            begin = True
            continue
        begin = char in " [{,:" and (begin or depth > 0)
        values[-1] += char
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRun:
    """Finished run of a sweep."""

    overrides: list[str]
    """Overrides that differ between the runs."""
    folder: str
    exit_reason: str
    metrics: dict[str, float]


def run_sweep(
    program: str, cls: type[RunConfig], recipe: str, combinations: list[list[str]], *, only_explain: bool = False
) -> int:
    """Run every combination and print a table. Return 0 if all succeed, otherwise the first other exit code.

    Every recipe is checked before the first run starts.
    """
    loaded = [load_recipe(cls, recipe, overrides) for overrides in combinations]
    # All mistakes surface before the first run, not after hours of earlier runs.
    _check_folders([item.cfg for item in loaded], combinations)
    if only_explain:
        for overrides, item in zip(combinations, loaded, strict=True):
            print_line(f"# {' '.join(overrides)}")
            print_line(f"{explain(item)}\n", keep="\n")
        return 0
    first = loaded[0].cfg
    run_dir = Path(first.run_dir).absolute()
    with writing(run_dir):
        home = make_folder(run_dir, f"{first.name}-sweep-{time.strftime('%Y%m%d-%H%M%S')}")
    done: list[SweptRun] = []
    codes: list[int] = []
    for n, overrides in enumerate(combinations):
        own = _list_swept(overrides, combinations)
        print_line(f"sweep, run {n + 1} of {len(combinations)}: {' '.join(own)}")
        run_dir = home / f"{n:03d}"
        # A process per run: Ray and CUDA keep state in a process, and a crash must not end the sweep.
        codes.append(_run(program, recipe, [*overrides, f"run_dir={json.dumps(str(run_dir))}"]))
        done.append(read_run(run_dir, own, codes[-1]))
        # After every run, so that an interrupted sweep keeps the results so far.
        _write_table(home / "sweep.json", done)
        # Ctrl-C is meant for the sweep, and not only for the run that it reached.
        if codes[-1] == EXIT_CODE:
            break
    asked = [None if first.stop_when is None else first.stop_when.metric, first.checkpoint.best]
    show_table(done, [name for name in dict.fromkeys(asked) if name is not None])
    print_line(f"sweep folder: {home}")
    return next((code for code in codes if code), 0)


def _check_folders(configs: list[RunConfig], combinations: list[list[str]]) -> None:
    """Raise UserError if runs would overwrite each other."""
    for key in NOT_SWEPT:
        if len({getattr(cfg, key) for cfg in configs}) > 1:
            raise UserError(f"{key} is the same for all runs of a sweep: give it one value")
    for key in ("save_to", "push_to"):
        places = [place for cfg in configs if (place := getattr(cfg, key, None)) is not None]
        if len(set(places)) < len(places):
            raise UserError(
                f"{key}={places[0]} would be written by several runs of the sweep: leave it out, or sweep it"
            )
    # `index` finds the first equal configuration.
    if any(configs.index(cfg) != i for i, cfg in enumerate(configs)):
        raise UserError("two runs of the sweep are the same: give different values")


def _list_swept(overrides: list[str], combinations: list[list[str]]) -> list[str]:
    return [item for i, item in enumerate(overrides) if any(other[i] != item for other in combinations)]


def _run(program: str, recipe: str, overrides: list[str]) -> int:
    """Run the program until it ends. Ctrl-C reaches the program too; wait for its graceful stop."""
    process = subprocess.Popen([sys.executable, program, "--config", recipe, *overrides])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def read_run(run_dir: Path, overrides: list[str], code: int) -> SweptRun:
    """Read the results of a run from its folder. A run that died early has no metrics.jsonl."""
    # trackers write beside the run folders, such as mlflow.db
    folders = sorted((file.parent for file in run_dir.glob(f"*/{CONFIG}")), key=lambda path: path.stat().st_mtime)
    if not folders:
        return SweptRun(overrides=overrides, folder="", exit_reason=f"exit code {code}", metrics={})
    folder = folders[-1]  # one that resumed by itself has several
    log = folder / "metrics.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    metrics: dict[str, float] = {}
    for is_evaluation in (True, False):  # the last of both; the number of the step is a step's
        found = [line for line in map(json.loads, lines) if names.is_evaluation(line) == is_evaluation]
        metrics |= found[-1] if found else {}
    summary: dict[str, Any] = {}
    if (folder / "summary.json").is_file():
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    after = {
        # An RL run stores these names without the prefix eval/, a supervised run with it.
        name if name.startswith("eval/") else names.EVAL.format(name): v
        for name, v in summary.get("after", {}).items()
    }
    reason = summary.get("exit_reason", f"exit code {code}")
    return SweptRun(overrides=overrides, folder=str(folder), exit_reason=reason, metrics=metrics | after)


def _write_table(file: Path, done: list[SweptRun]) -> None:
    write_whole(file, json.dumps([asdict(run) for run in done], indent=1) + "\n")


def show_table(done: list[SweptRun], asked: Sequence[str] = ()) -> None:
    """Print a line per run: swept values, last metrics and exit reason.

    asked: metrics of the recipe's stop_when and checkpoint.best, which get columns beside those of SHOWN.
    """
    keys = [item.partition("=")[0] for item in done[0].overrides]
    chosen = [*SHOWN, *((name, name) for name in asked if name not in dict(SHOWN).values())]
    columns = [(heading, name) for heading, name in chosen if any(name in run.metrics for run in done)]
    rows = [[*keys, "steps", *(heading for heading, _ in columns), "ended"]]
    for run in done:
        steps = f"{run.metrics[names.STEP_NUMBER] + 1:.0f}" if names.STEP_NUMBER in run.metrics else "0"
        numbers = [f"{run.metrics[name]:.4f}" if name in run.metrics else "-" for _, name in columns]
        rows.append([*(item.partition("=")[2] for item in run.overrides), steps, *numbers, run.exit_reason[:60]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
