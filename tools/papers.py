"""Recipes of papers, and the page that lists them: python -m tools.papers

A recipe of `configs/papers/` has at its head the paper's title and address, `# differs:` with what else than model and
task differs from the paper, and `# golden: FILE CASE key=value ...`: the case of an independent oracle that its loss
equals, under settings of `alg` that are the oracle's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "configs" / "papers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Case of an oracle that a recipe's loss equals."""

    file: str
    """Name of the file in unit_tests/data/, without .json."""
    name: str
    settings: tuple[str, ...]
    """Settings of `alg` in which the case differs from the recipe, as key=value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """Recipe of a paper."""

    path: Path
    title: str
    address: str
    differs: str
    """Difference from the paper beside model and task; "" for none that is known."""
    case: Case | None


def read_papers() -> list[Paper]:
    """Read the heads of all recipes of papers, in the order of their titles."""
    return sorted(map(read_paper, FOLDER.glob("*.yaml")), key=lambda paper: paper.title.lower())


def read_paper(path: Path) -> Paper:
    """Read the head of a recipe. Raises UserError if its first line is not a title with an address."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if not (first := re.fullmatch(r"# (.+) \((https://\S+)\)", lines[0])):
        raise UserError(f"{path}: the first line must be `# TITLE (https://...)`")
    said = dict(line[2:].split(": ", 1) for line in lines if re.match(r"# (differs|golden): ", line))
    file, name, *settings = said["golden"].split() if "golden" in said else ("", "")
    case = Case(file=file, name=name, settings=tuple(settings)) if file else None
    return Paper(path=path, title=first[1], address=first[2], differs=said.get("differs", ""), case=case)


def make_table() -> list[str]:
    """Return the rows of the page, in Markdown."""
    rows = ["| paper | recipe | differs, beside model and task | oracle's case |", "|---|---|---|---|"]
    for paper in read_papers():
        link = f"[`{paper.path.name}`](../../configs/papers/{paper.path.name})"
        case = f"`{paper.case.name}`" if paper.case else "none"
        rows.append(f"| [{paper.title}]({paper.address}) | {link} | {paper.differs or '-'} | {case} |")
    return rows


if __name__ == "__main__":
    print("\n".join(make_table()))
