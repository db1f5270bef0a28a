"""Draw docs/learning_curves.svg from the numbers in docs/: python -m tools.benchmarks.learning_curves

The left panel is of docs/learning_curves.json, which `python -m tools.benchmarks.learning_matrix --curves` writes. The
right panel has our seeds of `python -m tools.benchmarks.learn_vs_trl run --task smollm2`. Their steps, samples and
learning rates are those of configs/smollm2_arithmetic.yaml.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import NamedTuple

from tools.benchmarks.processes import ROOT

DOCS = ROOT / "docs"
CURVES, IMAGE = DOCS / "learning_curves.json", DOCS / "learning_curves.svg"
Runs = dict[str, list[float]]
"""Rewards of every step, by the name of the run."""
WIDTH, HEIGHT = 960, 632
GOAL, WINDOW, BOLD = 0.9, 5, "GRPO"
BLUE, GREY = "#1f3fbf", "#d5d8de"
COLOURS = ("#d62728", "#2e7d46", "#e08214", "#8e44ad", "#0e9fb0", "#8c564b", "#d6409f", "#8a8d00", "#607d8b", "#222222")
DASHES = ("none", "5 3")
"""With the colours 20 pairs: no two thin lines look alike."""


class Look(NamedTuple):
    colour: str
    dashes: str = "none"
    width: float = 3

    def stroke(self) -> str:
        return f'fill="none" stroke="{self.colour}" stroke-dasharray="{self.dashes}" stroke-width="{self.width:g}"'


class Panel(NamedTuple):
    left: float
    runs: Runs
    title: str
    note: str
    width: float = 390
    top: float = 80
    height: float = 300
    label: str = "mean reward"
    """Quantity of the vertical axis, from 0 to 1."""

    @property
    def steps(self) -> int:
        """Return the number of steps of the longest run."""
        return max(map(len, self.runs.values()), default=1)

    def x(self, step: float) -> float:
        return self.left + self.width * step / self.steps

    def y(self, reward: float) -> float:
        # y grows downwards in SVG
        return self.top + self.height * (1 - reward)


def keep(file: Path, panel: str, name: str, rewards: list[float]) -> None:
    """Put the rewards of one run into the JSON `file`, one line per run, beside what it holds."""
    curves: dict[str, Runs] = json.loads(file.read_text()) if file.exists() else {}
    # rounded, and a line per run, so that a diff of the file can be read
    curves.setdefault(panel, {})[name] = [round(reward, 4) for reward in rewards]
    panels = []
    for key, runs in sorted(curves.items()):
        lines = ",\n".join(f"  {json.dumps(run)}: {json.dumps(values)}" for run, values in runs.items())
        panels.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
    file.write_text("{\n" + ",\n".join(panels) + "\n}\n")


def draw(curves: dict[str, Runs]) -> str:
    """Return the image as SVG."""
    head = f'''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">
<title>Learning curves: mean reward per step</title>
<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'''
    parts = quickstart(curves.get("quickstart", {})) + smollm2(curves.get("smollm2", {}))
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def quickstart(runs: Runs) -> list[str]:
    """Draw runs on the quickstart's task: thin lines, and a bold one above them."""
    note = f"A run ends at the step that reaches {GOAL:g}; {BOLD} goes on."
    panel = Panel(left=65, runs=runs, title=f"The quickstart's task, {len(runs)} algorithms", note=note)
    looks = dict.fromkeys(runs, Look(BLUE))
    for i, name in enumerate(name for name in runs if name != BOLD):
        looks[name] = Look(COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)], 1.3)
    goal = f'<path d="M{panel.left:g},{panel.y(GOAL):g} h{panel.width:g}" stroke="#222" stroke-dasharray="7 4"/>'
    parts = [*axes(panel), goal, *legend(panel, looks)]
    # the bold line last, because SVG paints in order
    for name in sorted(runs, key=lambda name: name == BOLD):
        rewards, look = runs[name], looks[name]
        parts += [curve(panel, rewards, look), dot(panel, len(rewards), rewards[-1], look.colour)]
    return parts


def smollm2(runs: Runs) -> list[str]:
    """Draw the steps of a real model as points, and their running mean."""
    note = f"Points: one step each. Line: mean of the last {WINDOW} steps."
    panel = Panel(left=540, runs=runs, title="SmolLM2-135M on addition", note=note)
    looks = {name: Look(colour) for name, colour in zip(runs, (BLUE, *COLOURS), strict=False)}
    parts = [*axes(panel), *legend(panel, looks)]
    for name, rewards in runs.items():
        parts += [dot(panel, step, reward, looks[name].colour) for step, reward in enumerate(rewards, 1)]
        parts.append(curve(panel, running_mean(rewards), looks[name]))
    return parts


def running_mean(rewards: list[float]) -> list[float]:
    """Average every step with the ones before it, WINDOW in all; the first steps with fewer."""
    windows = [rewards[max(0, end - WINDOW) : end] for end in range(1, len(rewards) + 1)]
    return [sum(window) / len(window) for window in windows]


def axes(panel: Panel) -> list[str]:
    """Draw the frame of a panel with its title, ticks and labels."""
    left, middle, bottom = panel.left, panel.y(0.5), panel.y(0)
    label = text(left - 42, middle, panel.label, anchor="middle")
    parts = [
        text(left, panel.top - 40, panel.title, size=17, bold=True),
        text(left, panel.top - 18, panel.note, size=12),
        text(left + panel.width / 2, bottom + 42, "training step", anchor="middle"),
        f'<g transform="rotate(-90 {left - 42:g} {middle:g})">{label}</g>',
    ]
    for reward in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(f'<path d="M{left:g},{panel.y(reward):g} h{panel.width:g}" stroke="{GREY}"/>')
        parts.append(text(left - 8, panel.y(reward) + 4, f"{reward:.1f}", size=12, anchor="end"))
    # at most nine numbers, so that they do not touch
    for step in range(0, panel.steps + 1, 5 * -(-panel.steps // 40)):
        parts.append(f'<path d="M{panel.x(step):.1f},{bottom:g} v5" stroke="#222"/>')
        parts.append(text(panel.x(step), bottom + 20, str(step), size=12, anchor="middle"))
    parts.append(f'<path d="M{left:g},{panel.top:g} V{bottom:g} h{panel.width:g}" fill="none" stroke="#222"/>')
    return parts


def curve(panel: Panel, rewards: list[float], look: Look) -> str:
    points = " ".join(f"{panel.x(step):.1f},{panel.y(reward):.1f}" for step, reward in enumerate(rewards, 1))
    return f'<polyline points="{points}" {look.stroke()} stroke-linejoin="round"/>'


def dot(panel: Panel, step: int, reward: float, colour: str) -> str:
    return f'<circle cx="{panel.x(step):.1f}" cy="{panel.y(reward):.1f}" r="3" fill="{colour}" fill-opacity="0.6"/>'


def legend(panel: Panel, looks: dict[str, Look]) -> list[str]:
    """List the lines below a panel, in two columns."""
    parts, rows = [], -(-len(looks) // 2)
    for i, (name, look) in enumerate(looks.items()):
        x, y = panel.left + 200 * (i // rows), panel.y(0) + 70 + 18 * (i % rows)
        parts += [f'<path d="M{x:g},{y - 4:g} h28" {look.stroke()}/>', text(x + 36, y, name, size=12)]
    return parts


def text(x: float, y: float, what: str, *, size: int = 13, bold: bool = False, anchor: str = "start") -> str:
    how = f'font-size="{size}" font-weight="{"bold" if bold else "normal"}" text-anchor="{anchor}" fill="#222"'
    return f'<text x="{x:.1f}" y="{y:g}" {how}>{escape(what)}</text>'


def read_curves() -> dict[str, Runs]:
    """Return the runs of both panels."""
    seeds = sorted((DOCS / "learn_vs_trl").glob("smollm2-grpo-ours-*.json"))
    return json.loads(CURVES.read_text()) | {
        "smollm2": {f"{BOLD}, seed {n}": json.loads(file.read_text())["values"] for n, file in enumerate(seeds)}
    }


def main() -> None:
    IMAGE.write_text(draw(read_curves()))


if __name__ == "__main__":
    main()
