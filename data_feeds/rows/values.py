"""Convert data set values to text, independent of how a column stores them."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from data_feeds.rows.invalid_rows import InvalidRow, Reason

EXACT = 2**53
"""Largest range in which floats represent every integer."""
IMAGE_TYPES = ("image", "image_url")
"""Types of message parts that are images."""
SOURCES = ("image", "path", "url", "bytes", "image_url")
"""Keys of an image part that may contain the image."""


def is_absent(given: Any) -> bool:
    """Return whether an image is missing. Columnar files write all keys, such as {bytes: null, path: null}."""
    return given is None or (isinstance(given, dict) and all(value is None for value in given.values()))


def to_text(value: Any, column: str, reason: Reason) -> str:
    """Return text unchanged, and numbers as usually written. Raises InvalidRow for other types.

    A column of integers becomes floats if a row lacks a value, so 5.0 is written 5.

    >>> [to_text(value, "answer", "bad_answer") for value in (" 5", 5, 5.0, -0.0, 0.5, Decimal("5.00"))]
    [' 5', '5', '5', '0', '0.5', '5']
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return str(int(value)) if abs(value) < EXACT and value == int(value) else str(value)
    raise InvalidRow(reason, f"{column} must be text or a number, found {value!r:.60}: write one {column} as text")


def holds_lone_surrogate(value: Any) -> bool:
    r"""Return whether a text in a row contains a lone surrogate (JSON's "\ud800"), invalid in UTF-8.

    >>> holds_lone_surrogate({"a": [{"b": "x\ud800"}]}), holds_lone_surrogate({"a": "\U0001f600", "b": 3})
    (True, False)
    """
    if isinstance(value, str):
        return not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, dict):
        return any(holds_lone_surrogate(k) or holds_lone_surrogate(v) for k, v in value.items())
    return isinstance(value, list) and any(map(holds_lone_surrogate, value))
