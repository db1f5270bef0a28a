"""Text of others (a model's output, an error's message) made safe for a terminal and a log file."""

from __future__ import annotations

import unicodedata

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of Unicode that move the cursor, change colours, turn the reading direction, or show nothing."""


def escape_controls(text: str, *, keep: str = "\n") -> str:
    r"""Return the text with every control character written as Python would write it, but those to keep.

    >>> print(escape_controls("red \x1b[31m, back \r, and\u202e turned"))
    red \x1b[31m, back \r, and\u202e turned
    """
    if text.isprintable():  # the usual case
        return text
    return "".join(
        c.encode("unicode_escape").decode() if c not in keep and unicodedata.category(c) in _UNSAFE else c for c in text
    )


def shorten_middle(text: str, longest: int) -> str:
    """Return at most about `longest` characters: the beginning and the end, and how many are left out between them.

    >>> shorten_middle("a" * 10 + "b" * 10, 12)
    'aaaaaaaa [8 characters] bbbb'
    """
    if len(text) <= longest:
        return text
    tail = longest // 3
    head = longest - tail
    return f"{text[:head]} [{len(text) - longest} characters] {text[len(text) - tail :]}"
