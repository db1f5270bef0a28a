"""Draw docs/concepts/one_step.svg: python -m tools.draw_step. Boxes and arrows are listed here."""

from __future__ import annotations

from html import escape
from pathlib import Path

OUT = Path(__file__).parent.parent / "docs" / "concepts" / "one_step.svg"
WIDTH, HEIGHT = 900, 470
COLOURS = {"driver": ("#eef1fb", "#3f51b5"), "engine": ("#e8f5ec", "#2e7d46"), "trainer": ("#fdf1e3", "#c26a10")}
BOXES = {
    # name: (x, y, width, kind, title, lines)
    "prompts": (20, 100, 190, "driver", "Prompts", ("one row of the data set", "= one group")),
    "engines": (355, 100, 190, "engine", "Engines (vLLM)", ("tokens, log-probabilities,", "version of the weights")),
    "rewards": (690, 100, 190, "engine", "Environment, reward", ("processes that may die;", "named parts")),
    "columns": (690, 270, 190, "trainer", "2 Add columns", ("ref_logp, values,", "prox_logp: if required")),
    "advantages": (467, 270, 190, "driver", "3 Compute advantages", ("the algorithm,", "over all groups at once")),
    "pack": (244, 270, 190, "driver", "4 Weights, packing", ("one weight per token,", "then micro-batches")),
    "train": (20, 270, 190, "trainer", "4 Train (DeepSpeed)", ("minimise the sum of", "weight x loss")),
}
ARROWS = [
    # (points, label, x and y of the label)
    ([(210, 140), (355, 140)], "messages", 282, 130),
    ([(545, 125), (690, 125)], "completion", 617, 115),
    ([(690, 160), (545, 160)], "next turn", 617, 178),
    ([(785, 180), (785, 270)], "1 Groups of Samples", 722, 230),
    ([(690, 310), (657, 310)], "", 0, 0),
    ([(467, 310), (434, 310)], "", 0, 0),
    ([(244, 310), (210, 310)], "", 0, 0),
    (
        [(115, 270), (115, 215), (450, 215), (450, 180)],
        "5 weight sync, then proof: checksums and a probe prompt",
        282,
        207,
    ),
]


def draw() -> str:
    """Return the drawing of a training step as SVG, WIDTH x HEIGHT pixels."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<title>One training step</title>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L10,5 L0,10 z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        text(20, 40, "One training step", size=20, bold=True),
        text(20, 64, "Generation (top) and training (bottom) run at the same time when max_staleness is above 0."),
    ]
    for points, label, x, y in ARROWS:
        path = " ".join(f"{px},{py}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="#555" stroke-width="1.6" marker-end="url(#tip)"/>')
        if label:
            parts.append(text(x, y, label, middle=True, size=12))
    for x, y, width, kind, title, lines in BOXES.values():
        fill, stroke = COLOURS[kind]
        parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="80" rx="6" fill="{fill}" stroke="{stroke}"/>')
        parts.append(text(x + width / 2, y + 25, title, middle=True, bold=True))
        parts += [text(x + width / 2, y + 46 + 18 * i, line, middle=True, size=12) for i, line in enumerate(lines)]
    parts.append(text(20, 385, "After it: 6 evaluate, 7 log, 8 checkpoint.", size=13))
    for i, (kind, who) in enumerate(
        {"driver": "driver", "engine": "rollout workers", "trainer": "trainer ranks"}.items()
    ):
        fill, stroke = COLOURS[kind]
        parts.append(
            f'<rect x="{20 + 170 * i}" y="415" width="16" height="16" rx="3" fill="{fill}" stroke="{stroke}"/>'
        )
        parts.append(text(44 + 170 * i, 428, who, size=13))
    return "\n".join([*parts, "</svg>"]) + "\n"


def text(x: float, y: float, what: str, *, size: int = 14, bold: bool = False, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    weight = ' font-weight="bold"' if bold else ""
    # escaped, because a label may hold & or <
    return f'<text x="{x:g}" y="{y}" font-size="{size}"{anchor}{weight} fill="#222">{escape(what)}</text>'


if __name__ == "__main__":
    OUT.write_text(draw())
