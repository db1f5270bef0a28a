"""Rows of one data set, and the order of their draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from configs.data_schema import OURS
from core.types.samples import Group, Prompt
from data_feeds.rows.invalid_rows import InvalidRows
from data_feeds.rows.mixture import pick_row, pick_row_with_replacement

Item = TypeVar("Item", Prompt, Group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Generic[Item]):
    """Valid rows of one data set."""

    name: str
    items: list[Item]
    stream: str
    """Seed string for the order of the rows."""
    replacement: bool = False
    invalid: InvalidRows = field(default_factory=InvalidRows)
    form: str = OURS
    """Form of the rows: see data_feeds/rows/forms.py."""
    notes: list[str] = field(default_factory=list[str])
    """Sentences about the form and the choice of the rows."""

    is_lazy: ClassVar[bool] = False
    """True if rows are read when they are drawn, and `items` has only the first that are drawn."""

    @property
    def rows(self) -> int:
        """Number of rows to draw from."""
        return len(self.items)

    @property
    def digest(self) -> str | None:
        """Hash of a file whose rows are not all in `items`; None otherwise."""
        return None

    def pick(self, nth: int) -> int:
        """Return the row of the nth draw. Each pass has every row once, or rows are drawn with replacement."""
        pick = pick_row_with_replacement if self.replacement else pick_row
        return pick(self.stream, nth, self.rows)

    def read(self, row: int) -> Item:
        """Return a row by number."""
        return self.items[row]

    def draw(self, nth: int) -> Item:
        """Return the item of the nth draw."""
        return self.read(self.pick(nth))

    def prepare(self, nths: Sequence[int]) -> None:
        """Convert the rows of these draws in the background, if they are on disk."""
