"""Summary of an object for people: text where it is printed, a table of HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Some lines and a table."""

    lines: Sequence[str]
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Cells as text; the first of a row is its name."""

    def to_text(self) -> str:
        """Format as plain text.

        >>> print(Summary(lines=["done"], headings=("", "after"), rows=[("reward", "0.5")]).to_text())
        done
                after
        reward    0.5
        """
        cells = [self.headings, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = [
            "  ".join(f"{c:>{w}}" if i else f"{c:<{w}}" for i, (c, w) in enumerate(zip(r, widths, strict=True)))
            for r in cells
        ]
        return "\n".join([*self.lines, *(line.rstrip() for line in table)])

    def to_html(self) -> str:
        """Format as HTML; all text is escaped."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.headings)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self.rows else ""
        return "".join(f"<div>{escape(line)}</div>" for line in self.lines) + table


class Summarized:
    """Base of objects that print a summary, and show it as a table in a notebook."""

    def summarize(self) -> Summary:
        """Return the summary."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summarize().to_text()

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows for the object."""
        return self.summarize().to_html()
