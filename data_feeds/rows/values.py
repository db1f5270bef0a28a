"""Convert data set values to text, independent of how a column stores them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from core.text.json_text import decode_json, holds_lone_surrogate
from data_feeds.rows.invalid_rows import InvalidRow, Reason

EXACT = 2**53
"""Largest range in which floats represent every integer."""
IMAGE_TYPES = ("image", "image_url")
"""Types of message parts that are images."""
SOURCES = ("image", "path", "url", "bytes", "image_url")
"""Keys of an image part that may contain the image."""

BEGIN_OF_TURNS = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content)\1\s*:""")
"""Beginning of turns as text, also if the text is cut off or is Python instead of JSON."""


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


def load_json(text: str) -> Any:
    """Parse JSON text of a row. Raises ValueError for other text, and InvalidRow for a lone surrogate in it."""
    value = decode_json(text)
    check_characters(value)
    return value


def parse_turns(text: str, column: str) -> list[Any] | None:
    """Parse JSON text of turns, or return None for other text, such as a prompt that is JSON itself.

    Raises InvalidRow for turns that cannot be read: their text would be taken for what a user or the policy says.
    """
    if not text.lstrip().startswith("["):
        return None
    try:
        turns = load_json(text)
    except ValueError as error:
        if BEGIN_OF_TURNS.match(text):
            raise InvalidRow("bad_messages", f"{column} begins as turns and is no JSON: {error}") from error
        return None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        return None
    if all({"from", "value"} <= turn.keys() for turn in turns):
        raise InvalidRow("bad_messages", f"{column} holds turns of ShareGPT: write form: sharegpt in the source")
    return turns if all("role" in turn for turn in turns) else None


def find_value(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column, or of a dotted path into objects and lists; None if the row has none.

    >>> find_value({"a": {"b": [3, 4]}}, "a.b.1"), find_value({"a.b": 1}, "a.b"), find_value({"a": 5}, "a.b")
    (4, 1, None)
    """
    if path in row or "." not in path:  # a column may have a dot in its name
        return row.get(path)
    value: Any = row
    for part in path.split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def parse_list(text: str) -> list[Any] | None:
    """Parse JSON text of a list, or return None for other text."""
    try:
        value = load_json(text) if text.lstrip().startswith("[") else None
    except ValueError:
        return None
    return value if isinstance(value, list) else None


def check_characters(value: Any) -> None:
    """Raise InvalidRow if a text in a row holds half of a character."""
    if holds_lone_surrogate(value):
        raise InvalidRow("bad_text", 'a text holds half of a character (such as "\\ud800"): write it again')
