"""Make foreign text (model output, error messages) safe for a terminal and a log file."""

from __future__ import annotations

import sys
import unicodedata
from typing import TextIO

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, change colours or the reading direction, or are invisible."""


def escape_controls(text: str, *, keep: str = "\n") -> str:
    r"""Escape every control character as Python does, except those in `keep`.

    >>> print(escape_controls("red \x1b[31m, back \r, and\u202e turned"))
    red \x1b[31m, back \r, and\u202e turned
    """
    if text.isprintable():  # the usual case
        return text
    # Only now character by character, because a look-up in Python is slow for the long texts of a model.
    return "".join(
        c.encode("unicode_escape").decode() if c not in keep and unicodedata.category(c) in _UNSAFE else c for c in text
    )


def print_line(text: str, *, keep: str = "", file: TextIO | None = None) -> None:
    """Print a sentence with its control characters escaped. Every program prints what is not a constant by this.

    keep: the line end, for text of several lines. file: standard output by default.
    """
    # line and end in one write, since a line of another thread could come between two
    print(f"{escape_controls(text, keep=keep)}\n", end="", file=file or sys.stdout, flush=True)


def shorten_middle(text: str, longest: int) -> str:
    """Truncate text in the middle to about `longest` characters, with the number of omitted characters.

    >>> shorten_middle("a" * 10 + "b" * 10, 12)
    'aaaaaaaa [8 characters] bbbb'
    """
    if len(text) <= longest:
        return text
    # The beginning of a text usually says more than its end.
    tail = longest // 3
    head = longest - tail
    return f"{text[:head]} [{len(text) - longest} characters] {text[len(text) - tail :]}"
