"""Invalid rows: counts and an example for each reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from core.errors import UserError

Reason = Literal[
    "missing_column",
    "empty",
    "bad_messages",
    "bad_tools",
    "bad_text",
    "bad_answer",
    "bad_id",
    "bad_extra",
    "bad_image",
    "no_reply",
    "ends_in_reply",
    "not_one_prompt",
    "same_reply",
    "bad_label",
    "bad_episode",
    "too_long",
]


class InvalidRow(Exception):
    """Error of a row that cannot be used. Other rows may be valid."""

    def __init__(self, reason: Reason, why: str):
        super().__init__(why)
        self.reason: Reason = reason
        self.why = why


@dataclass(frozen=True, slots=True)
class Case:
    """Invalid rows with the same reason."""

    rows: int
    example: str
    """Id of the first of these rows."""
    why: str
    """Problem of the example row."""


@dataclass(slots=True, kw_only=True)
class InvalidRows:
    """Counts of invalid rows, by reason."""

    unit: str = "row"
    """Word for a row of this source."""
    looked_at: int = 0
    repeated_ids: int = 0
    """Rows that were renamed because an earlier row has their id. They count as valid."""
    cases: dict[Reason, Case] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(case.rows for case in self.cases.values())

    @property
    def share(self) -> float:
        return self.rows / self.looked_at if self.looked_at else 0.0

    def __str__(self) -> str:
        """
        >>> str(InvalidRows(looked_at=9, cases={"too_long": Case(2, "gsm8k/7", "31 tokens")}))
        '2 too_long (such as row gsm8k/7: 31 tokens)'
        """
        return ", ".join(
            f"{case.rows} {reason} (such as {self.unit} {case.example}: {case.why})"
            for reason, case in self.cases.items()
        )

    def describe_repeats(self) -> str:
        return f"{self.repeated_ids} rows have the id of an earlier row: # and their row number are appended to it"

    def check(self, key: str, looked_at: str, *, has_valid: bool, most: float) -> None:
        """Raise UserError if no row is valid, or a larger fraction than `most` is not. looked_at: rows in words."""
        if not has_valid:
            raise UserError(f"{key}: none of {self.looked_at} rows is valid: {self}")
        # a few bad rows are normal; many mean a wrong column or template
        if self.share > most:
            raise UserError(
                f"{key}: {self.rows} of {looked_at} are invalid, a larger fraction than data.max_invalid_fraction="
                f"{most:g}: {self}; repair them, or raise that"
            )

    def add(self, row_id: str, error: InvalidRow) -> None:
        """Count a row that cannot be used."""
        # the first row of a reason stays the example
        first = self.cases.get(error.reason, Case(0, row_id, error.why))
        self.cases[error.reason] = replace(first, rows=first.rows + 1)

    def as_facts(self) -> dict[str, Any]:
        """Return the counts for summary.json."""
        invalid = {
            reason: {"rows": case.rows, "example": case.example, "why": case.why} for reason, case in self.cases.items()
        }
        return {"invalid": invalid, "repeated_ids": self.repeated_ids}
