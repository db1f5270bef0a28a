"""JSON text: read with an error for deep nesting, and written with null for NaN and infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def decode_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for anything else, and for JSON that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def holds_lone_surrogate(value: Any) -> bool:
    r"""Return whether a text of a JSON value has a lone surrogate ("\ud800"), which UTF-8 and tokenizers do not have.

    >>> holds_lone_surrogate({"a": [{"b": "\ud800"}, "\udfff"]}), holds_lone_surrogate({"a": "\U0001f600", "b": 3})
    (True, False)
    """
    if isinstance(value, str):
        return not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, dict):
        return any(holds_lone_surrogate(k) or holds_lone_surrogate(v) for k, v in value.items())
    return isinstance(value, list) and any(map(holds_lone_surrogate, value))


def dump_json(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """Return JSON text, with null for numbers that are not finite.

    >>> dump_json({"a": (1.0, float("inf"))})
    '{"a": [1.0, null]}'
    """
    return json.dumps(replace_non_finite(value), default=default)


def replace_non_finite(value: Any) -> Any:
    """Return a copy of a value for JSON, with None for numbers that are not finite.

    >>> replace_non_finite({"a": [1.0, float("inf")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {name: replace_non_finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
