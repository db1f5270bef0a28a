"""Tables of algs/README.md that benchmarks fill in, a row per algorithm and seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tools.benchmarks.processes import ROOT

README = ROOT / "algs" / "README.md"
MARK = "<!-- {}: {} -->\n"


def write_rows(name: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, order: Sequence[str]) -> None:
    """Put rows into the table of this name; rows of other algorithms and seeds stay.

    head: titles of the columns; the first two are algorithm and seed. order: all algorithms that may have a row.
    """
    text = README.read_text(encoding="utf-8")
    begin, end = (MARK.format(name, edge) for edge in ("begin", "end"))
    before, rest = text.split(begin)
    old, after = rest.split(end)
    README.write_text(before + begin + make_table(head, merge_rows(read_rows(old), rows, order)) + end + after)


def read_rows(table: str) -> list[list[str]]:
    """Return the cells of a table in Markdown, without the two lines of the head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def merge_rows(old: Iterable[Sequence[str]], new: Iterable[Sequence[str]], order: Sequence[str]) -> list[Sequence[str]]:
    """Merge rows: one per algorithm and seed, the new one if there are two, in this order of algorithms.

    >>> merge_rows([["b", "0", "7"], ["gone", "0", "1"]], [["a", "0", "3"], ["b", "0", "8"]], ["a", "b"])
    [['a', '0', '3'], ['b', '0', '8']]
    """
    rows = {(row[0], row[1]): row for row in [*old, *new] if row[0] in order}
    return sorted(rows.values(), key=lambda row: (int(row[1]), order.index(row[0])))


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(make_table(["algorithm", "seed"], [["grpo", "0"]]), end="")
    | algorithm | seed |
    |---|---|
    | grpo | 0 |
    """
    lines = [head, *rows]
    first, *others = (f"| {' | '.join(row)} |\n" for row in lines)
    return first + "|" + "---|" * len(head) + "\n" + "".join(others)
