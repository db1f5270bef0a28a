"""Table and image of tools/benchmarks/learn_vs_trl.py: means over seeds with 95 % intervals."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from tools.benchmarks.learn_work import MEASURES, WORKS
from tools.benchmarks.learning_curves import BLUE, COLOURS, Look, Panel, axes, curve, text

WINDOW = 10
"""Last steps that are averaged."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""Two-sided 95 % quantiles of Student's t with 1, 2, ... degrees of freedom."""
SIDES = {"ours": "FeynRL", "trl": "TRL 1.16"}
WHOLE_GROUPS = "trl_groups"
"""Side of TRL without the shuffle of a step's samples over the updates, in GRPO."""
LOOKS = {"ours": Look(BLUE), "trl": Look(COLOURS[0], "7 5", 2)}
"""TRL's line is dashed and above ours, so that equal curves show both."""
WIDTH, HEIGHT, PANEL_WIDTH, PANEL_HEIGHT = 1000, 284, 250, 170


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Result of one side with one seed, as its file holds it."""

    task: str
    method: str
    side: str
    seed: int
    commit: str
    settings: str
    """Digest of the settings of both sides."""
    order: str
    """Digest of the rows that the recipe draws, in their order; see learn_vs_trl.py for whether they are compared with
    those of the run."""
    values: list[float]
    """Measure of every step."""
    seconds: list[float]
    """Seconds of every step."""
    held_out: float
    """Mean reward of sampled replies to held-out prompts after training."""
    cores: int
    load: float
    """Mean number of running processes on the machine in the minute before the end."""
    device: str
    """Name of the GPU, or cpu."""


Runs = dict[int, dict[str, Learnt]]
"""Results of a comparison by seed and side."""


def read_results(folder: Path) -> dict[tuple[str, str], Runs]:
    """Read the seeds of which both sides are there. Raises SystemExit for sides that did other work.

    Ours beside TRL with whole groups is a separate comparison.
    """
    found: dict[tuple[str, str], Runs] = {}
    for file in sorted(folder.glob("*.json")):
        one = Learnt(**json.loads(file.read_text()))
        if one.settings != WORKS[one.task, one.method].hash_settings():
            raise SystemExit(f"error: {file} was measured with other settings than learn_work.py has: measure it again")
        for method, side in list_places(one):
            found.setdefault((one.task, method), {}).setdefault(one.seed, {})[side] = one
    pairs = {key: {seed: both for seed, both in runs.items() if len(both) == 2} for key, runs in found.items()}
    for key, runs in pairs.items():
        if len(devices := sorted({one.device for both in runs.values() for one in both.values()})) > 1:
            raise SystemExit(f"error: {key} has results of {', '.join(devices)}: keep each device's in a folder")
        for seed, both in runs.items():
            if both["ours"].order != both["trl"].order:
                raise SystemExit(f"error: the sides of {key} with seed {seed} saw other rows: measure both again")
    return {key: runs for key, runs in sorted(pairs.items()) if runs}


def list_places(one: Learnt) -> list[tuple[str, str]]:
    """Return the comparisons in which a result is, each with the side there."""
    of_groups = f"{one.method}, whole groups"
    if one.side == WHOLE_GROUPS:
        return [(of_groups, "trl")]
    return [(one.method, one.side), *([(of_groups, "ours")] if one.side == "ours" else [])]


def find_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % interval (Student's t); infinite for a single value."""
    if len(values) < 2:
        return values[0], math.inf
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), STUDENT[min(len(values) - 2, len(STUDENT) - 1)] * spread


def find_window(one: Learnt) -> int:
    """Return the number of last steps that are averaged: of a short run, the second half."""
    return min(WINDOW, max(1, len(one.values) // 2))


def average_last(one: Learnt) -> float:
    return statistics.mean(one.values[-find_window(one) :])


def average_until(one: Learnt, seconds: float) -> float:
    """Average the last steps that are done after so many seconds; of none, the first step."""
    done = sum(end <= seconds for end in find_ends(one))
    return statistics.mean(one.values[max(0, done - find_window(one)) : max(1, done)])


def find_ends(one: Learnt) -> list[float]:
    """Return the seconds from the start to the end of every step."""
    return list(accumulate(one.seconds))


def list_numbers(runs: Runs) -> dict[str, dict[str, list[float]]]:
    """Return the compared numbers of each side, one per seed."""

    def of_both(number: Callable[[Learnt], float]) -> dict[str, list[float]]:
        return {side: [number(both[side]) for both in runs.values()] for side in SIDES}

    # not sum(), which rounds otherwise, so that the last step could seem to end too late
    ends = {seed: min(find_ends(one)[-1] for one in both.values()) for seed, both in runs.items()}
    window = max(find_window(one) for both in runs.values() for one in both.values())
    return {
        f"last {window} steps": of_both(average_last),
        "all steps": of_both(lambda one: statistics.mean(one.values)),
        "at equal seconds": of_both(lambda one: average_until(one, ends[one.seed])),
        "held-out reward": of_both(lambda one: one.held_out),
    }


def make_table(results: dict[tuple[str, str], Runs]) -> str:
    """Return a Markdown table. The difference is of pairs with the same seed, bold if its interval is beyond 0."""
    lines = ["| task | method | number | seeds | ours | TRL | ours minus TRL |", "|---|---|---|---|---|---|---|"]
    for (task, method), runs in results.items():
        for name, numbers in list_numbers(runs).items():
            apart = [ours - trl for ours, trl in zip(numbers["ours"], numbers["trl"], strict=True)]
            mean, half = find_interval(apart)
            shown = show(apart, signed=True)
            cells = [task, method, name, str(len(runs)), show(numbers["ours"]), show(numbers["trl"])]
            lines.append(f"| {' | '.join([*cells, f'**{shown}**' if abs(mean) > half else shown])} |")
    return "\n".join(lines)


def list_circumstances(results: dict[tuple[str, str], Runs]) -> str:
    """Return a line per comparison with the device, the commits and the loads of its results."""
    lines: list[str] = []
    for (task, method), runs in results.items():
        done = [one for both in runs.values() for one in both.values()]
        commits, loads = sorted({one.commit for one in done}), [one.load for one in done]
        cores = ", ".join(map(str, sorted({one.cores for one in done})))
        load = f"load {min(loads)} to {max(loads)}; {cores} cores"
        lines.append(f"{task} {method}: {done[0].device}; commit {', '.join(commits)}; {load}")
    return "\n".join(lines)


def show(values: Sequence[float], *, signed: bool = False) -> str:
    mean, half = find_interval(values)
    text = f"{mean:+.3f}" if signed else f"{mean:.3f}"
    return text if math.isinf(half) else f"{text} ± {half:.3f}"


def draw(results: dict[tuple[str, str], Runs], task: str) -> str:
    """Return the curves of a task as SVG: mean over the seeds, and its 95 % interval, at equal steps."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<title>Learning curves of FeynRL and TRL on equal weights, rows and settings</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
    ]
    shown = [(method, results[task, method]) for method in MEASURES if (task, method) in results]
    for n, (method, runs) in enumerate(shown):
        band = {side: interval_of_steps(runs, side) for side in SIDES}
        means = {SIDES[side]: [mean for mean, _ in steps] for side, steps in band.items()}
        # with two seeds the interval is 13 times their standard error, and would hide the curves
        has_band = len(runs) > 2
        note = f"{len(runs)} seeds{', 95 % band' * has_band}; same weights and rows"
        left = 62 + n * (PANEL_WIDTH + 80)
        title, label = method.upper(), MEASURES[method]
        size = {"top": 60, "width": PANEL_WIDTH, "height": PANEL_HEIGHT}
        panel = Panel(left=left, runs=means, title=title, note=note, label=label, **size)
        parts += axes(panel)
        parts += [fill_band(panel, steps, LOOKS[side]) for side, steps in band.items() if has_band]
        parts += [curve(panel, means[name], LOOKS[side]) for side, name in SIDES.items()]
        parts += list_sides(panel) if n == 0 else []
    return "\n".join([*parts, "</svg>"]) + "\n"


def list_sides(panel: Panel) -> list[str]:
    """Name the lines inside the plot, at the right below, where no curve is."""
    parts: list[str] = []
    for n, (side, name) in enumerate(SIDES.items()):
        x, y = panel.left + panel.width - 110, panel.y(0.3) + 20 * n
        parts += [f'<path d="M{x:g},{y - 4:g} h28" {LOOKS[side].stroke()}/>', text(x + 36, y, name, size=12)]
    return parts


def interval_of_steps(runs: Runs, side: str) -> list[tuple[float, float]]:
    return [find_interval(values) for values in zip(*(both[side].values for both in runs.values()), strict=True)]


def fill_band(panel: Panel, steps: list[tuple[float, float]], look: Look) -> str:
    upper = [(step, min(1.0, mean + half)) for step, (mean, half) in enumerate(steps, 1)]
    lower = [(step, max(0.0, mean - half)) for step, (mean, half) in enumerate(steps, 1)]
    corners = " ".join(f"{panel.x(step):.1f},{panel.y(value):.1f}" for step, value in [*upper, *lower[::-1]])
    return f'<polygon points="{corners}" fill="{look.colour}" fill-opacity="0.15"/>'
