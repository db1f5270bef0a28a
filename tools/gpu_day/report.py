"""Table of a GPU day: as text, as JSON, and as Markdown for docs/results.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools.gpu_day.rows import BY_NAME, Numbers, Outcome

STATES = ("ok", "failed", "not run")


def describe(outcome: Outcome) -> str:
    """Return a line: the state, with the reason where there is one, and the numbers."""
    said = f"{outcome.state}: {outcome.reason}" if outcome.reason else outcome.state
    return f"{said}; {write_numbers(outcome.numbers)}" if outcome.numbers else said


def write_numbers(numbers: Numbers) -> str:
    """
    >>> write_numbers({"rows": 21, "GiB": 1.12345, "tokens/s": 51234.5, "kernel": "varlen_attn"})
    'rows 21; GiB 1.12; tokens/s 51,234; kernel varlen_attn'
    """
    return "; ".join(f"{name} {write_number(value)}" for name, value in numbers.items())


def write_number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def write_table(outcomes: Sequence[Outcome]) -> str:
    """Return two lines per row, and a last one that counts."""
    lines = [f"{'row':<14}{'result':<9}{'s':>6}{'MiB':>8}  what it looked at, and what it found"]
    for outcome in outcomes:
        mib = "-" if outcome.peak_mib is None else f"{outcome.peak_mib:.0f}"
        head = f"{outcome.name:<14}{outcome.state:<9}{outcome.seconds:>6.1f}{mib:>8}  "
        found = "; ".join(filter(None, (outcome.reason, write_numbers(outcome.numbers))))
        lines += [head + BY_NAME[outcome.name].about, " " * len(head) + found]
    return "\n".join([*lines, "", count_states(outcomes)])


def count_states(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(f"{sum(o.state == state for o in outcomes)} {state}" for state in STATES)


def write_markdown(machine: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    """Return a table for docs/results.md."""
    told = "; ".join(f"{name} {value}" for name, value in machine.items())
    lines = [f"`python -m tools.gpu_check` on {told}.", "", "| row | what | result | seconds |", "|---|---|---|---|"]
    for outcome in outcomes:
        cells = (outcome.name, BY_NAME[outcome.name].about, describe(outcome), f"{outcome.seconds:.0f}")
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join([*lines, "", f"{count_states(outcomes)}."]) + "\n"


def write_files(folder: Path, machine: dict[str, str], outcomes: Sequence[Outcome], *, rehearsal: bool) -> None:
    """Write gpu_day.json and gpu_day.md into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    day = {"rehearsal": rehearsal, "machine": machine, "rows": [asdict(outcome) for outcome in outcomes]}
    (folder / "gpu_day.json").write_text(json.dumps(day, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu_day.md").write_text(write_markdown(machine, outcomes), encoding="utf-8")
