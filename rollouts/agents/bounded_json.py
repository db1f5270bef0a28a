"""JSON of an agent's request, bounded before and while it is parsed. It may be anything: a program wrote it."""

from __future__ import annotations

import json
from typing import Any

from core.text.json_text import holds_lone_surrogate

MARKS = b'",\\[{:'
MOST_MARKS = 2**20
"""Maximum number of MARKS in a body. Each item needs one, and the parser does not let go before it is through."""
SLICE = 2**22
DEEPEST = 64
"""Maximum depth of lists and objects. Deeper ones end in a RecursionError, somewhere."""
LONGEST_INT = 400
"""Maximum number of digits. Reading an integer takes the square of its length; no float is as large."""


class Unreadable(ValueError):
    """Reason why a text is not read as JSON, as a clause."""


def count_marks(body: bytes) -> None:
    """Raise Unreadable for a body with too many items."""
    n = 0
    for start in range(0, len(body), SLICE):  # in slices, between which other threads may go on
        part = body[start : start + SLICE]
        n += len(part) - len(part.translate(None, MARKS))
        if n > MOST_MARKS:
            raise Unreadable(f"has more than {MOST_MARKS} quotes, commas and brackets: send less")


def read_json(text: bytes | str) -> Any:
    """Parse JSON. Raises Unreadable for anything else, if it is too deep, or if it holds half of a character."""
    try:
        found = json.loads(text, parse_int=_read_int, parse_float=_read_float)
    except Unreadable:
        raise
    except (ValueError, RecursionError) as error:
        raise Unreadable("must be JSON") from error
    _check(found)
    return found


def _read_int(digits: str) -> int:
    if len(digits) > LONGEST_INT:
        raise Unreadable(f"has a number of more than {LONGEST_INT} digits")
    return int(digits)


def _read_float(digits: str) -> float:
    return float(digits)  # in Python: between its calls other threads may go on


def _check(found: Any) -> None:
    waiting: list[tuple[Any, int]] = [(found, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, str):
            if holds_lone_surrogate(value):
                raise Unreadable("has a text that holds half of a character")
        elif isinstance(value, list | dict):
            if depth > DEEPEST:
                raise Unreadable(f"has more than {DEEPEST} lists and objects in each other")
            inside: list[Any] = [*value, *value.values()] if isinstance(value, dict) else value
            waiting += [(one, depth + 1) for one in inside]
