"""Rubrics of rows: criteria with points, and their sum.

The column `rubric` is a list of objects, or its JSON, with a text (criterion or description) and points (points or
weight).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.text.json_text import decode_json

TEXTS, POINTS = ("criterion", "description"), ("points", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Criterion of a rubric."""

    criterion: str
    points: float
    """Negative for a mistake."""


def read_rubric(row: str, extra: Mapping[str, Any]) -> list[Item]:
    """Parse a row's rubric. Raises ValueError if it is missing or malformed."""
    given = extra.get("rubric")
    try:
        listed = decode_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"{row}: rubric is no JSON: {given!r:.80}") from error
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{row} has no rubric: give it a column rubric, a list of criteria with points")
    return [_read_item(row, one) for one in listed]  # pyright: ignore[reportUnknownVariableType]


def _read_item(row: str, given: Any) -> Item:
    one: Mapping[str, Any] = given if isinstance(given, dict) else {}
    text = next((one[name] for name in TEXTS if isinstance(one.get(name), str)), "")
    points = next((one[name] for name in POINTS if type(one.get(name)) in (int, float)), None)
    if not text.strip() or points is None or not abs(points) <= 1e6:
        raise ValueError(f"{row}: a criterion must have a text and points, found {given!r:.80}")
    return Item(criterion=text, points=float(points))


def add_up(items: Sequence[Item], met: Sequence[float]) -> float:
    """Return the points that are met, divided by the positive points.

    Without positive points: 1 + points met / the sum of all absolute points, so that a reply without mistakes gets 1.

    >>> rows = [Item(criterion="a", points=2), Item(criterion="b", points=-1)]
    >>> add_up(rows, [1.0, 0.0]), add_up(rows, [0.0, 1.0]), add_up(rows[1:], [0.0])
    (1.0, -0.5, 1.0)
    """
    total = sum(item.points * share for item, share in zip(items, met, strict=True))
    positive = sum(max(item.points, 0.0) for item in items)
    if positive:
        return total / positive
    return 1.0 + total / (sum(abs(item.points) for item in items) or 1.0)
