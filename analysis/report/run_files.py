"""Read a run folder: config.yaml, metrics.jsonl, summary.json, samples/. Broken files are reported in a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from core import metrics as names
from core.errors import UserError, first_line, quote
from core.numbers import is_finite
from core.text.text_files import parse_json, read_text

Row = dict[str, Any]
"""Sample, as driver/records/sample_files.py writes it."""
NEEDED = ("group", "prompt", "completion", "reward")
STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Contents of a run folder without samples."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    """Empty while the run goes on, and after it was killed."""
    metrics: list[dict[str, float]]
    """A line per step, in order."""
    evaluations: dict[int, dict[str, float]]
    """Metrics on held-out rows, by the steps behind the weights."""
    sample_files: dict[int, Path]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def has_ended(self) -> bool:
        return bool(self.summary)


def read_run(folder: Path) -> RunRecord:
    """Read a run folder without samples. Raises UserError for other folders."""
    if not folder.is_dir():
        raise UserError(f"{quote(folder)} is no folder: name a run folder, such as runs/NAME-TIME")
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{quote(folder)} is no run folder, it has no metrics.jsonl: name one, such as runs/NAME-TIME")
    # the folder's name is that of the run, and `.` has none
    folder = folder.absolute()
    summary: object = {}
    if (folder / "summary.json").is_file():
        where = str(folder / "summary.json")
        summary = parse_json(read_text(folder / "summary.json", where), where)
        if not isinstance(summary, dict):
            raise UserError(f"{where} is no JSON object, which a run writes: name the folder of a run")
    metrics, evaluations = read_metrics(folder / "metrics.jsonl")
    return RunRecord(
        folder=folder,
        config=read_run_config(folder / "config.yaml"),
        summary=summary,
        metrics=metrics,
        evaluations=evaluations,
        sample_files=list_sample_files(folder / "samples"),
    )


def read_run_config(file: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(read_text(file, str(file)))
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {first_line(error)}") from error
    except RecursionError as error:
        raise UserError(f"{file} is nested too deeply: name the folder of a run") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds no keys: name the folder of a run")
    return config


def read_metrics(file: Path) -> tuple[list[dict[str, float]], dict[int, dict[str, float]]]:
    """Read the lines of steps and of evaluations. Raises UserError for an invalid line, or for a file without steps."""
    evaluations: dict[int, dict[str, float]] = {}
    lines: list[dict[str, float]] = []
    for where, text in numbered_lines(file):
        line = parse_json(text, where)
        if not isinstance(line, dict) or names.STEP_NUMBER not in line:
            raise UserError(f"{where} has no {names.STEP_NUMBER}: metrics.jsonl has one JSON object per step")
        for name, value in line.items():
            if not is_finite(value):
                raise UserError(f"{where}: {quote(name)} is {quote(value)}, and a finite number is expected")
        if len(line) > 1 and names.is_evaluation(line):
            evaluations[int(line[names.STEP_NUMBER])] = line
        else:
            lines.append(line)
    if not lines:
        raise UserError(f"{file} holds no step: the run has not finished its first, so there is nothing to show")
    steps = [line[names.STEP_NUMBER] for line in lines]
    if wrong := [b for a, b in pairwise(steps) if b <= a]:
        raise UserError(f"{file}: step {wrong[0]:g} comes after a step that is not before it: is it of two runs?")
    return lines, evaluations


def list_sample_files(folder: Path) -> dict[int, Path]:
    found = [(match, file) for file in sorted(folder.glob("step_*.jsonl")) if (match := STEP_FILE.fullmatch(file.name))]
    return {int(match[1]): file for match, file in found}


def read_samples(file: Path) -> list[Row]:
    """Read the samples of a step. A number that is not finite becomes None, and a failure of the sample."""
    rows: list[Row] = []
    for where, text in numbered_lines(file):
        odd: list[str] = []
        try:
            # called for NaN and Infinity, which are no JSON; append returns None, which becomes the value
            row = json.loads(text, parse_constant=odd.append)
        except (ValueError, RecursionError):
            row = parse_json(text, where)
        if not isinstance(row, dict):
            raise UserError(f"{where} is no sample, which is a JSON object")
        if missing := [key for key in NEEDED if key not in row]:
            raise UserError(f"{where} is no sample, it has no {missing[0]}")
        check_sample(row, where)
        if odd:
            row["failure"] = row.get("failure") or f"a number of this sample is {odd[0]}"
        rows.append(row)
    return rows


def check_sample(row: Row, where: str) -> None:
    """Raise UserError if a value that the page computes with is of another type than a run writes."""
    parts = row.get("reward_parts")
    for key in ("reward_parts", "counts"):
        if row.get(key) is not None and not isinstance(row[key], dict):
            raise UserError(f"{where}: {key} is {quote(row[key])}, and an object of numbers is expected")
    numbers = {"reward": row["reward"], "advantage": row.get("advantage"), "new_tokens": row.get("new_tokens")}
    for key, value in (*numbers.items(), *(parts or {}).items()):
        if value is not None and not is_finite(value):
            raise UserError(f"{where}: {quote(key)} is {quote(value)}, and a finite number is expected")
    if type(row["group"]) is not int:
        raise UserError(f"{where}: group is {quote(row['group'])}, and a whole number is expected")
    if not isinstance(row.get("id", ""), str):
        raise UserError(f"{where}: id is {quote(row['id'])}, and a text is expected")


def is_unfinished(run: RunRecord, step: int) -> bool:
    """Return True if a step's samples may be incomplete: still being written, or the run was killed."""
    return not run.has_ended and step == max(run.sample_files)


def numbered_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield file and number of each line that is not empty, and its text."""
    # not splitlines: it also cuts at characters such as U+2028, which a JSON string may hold
    for number, text in enumerate(read_text(file, str(file)).split("\n"), 1):
        if text.strip():
            yield f"{file}, line {number}", text
