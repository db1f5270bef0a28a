"""Mistakes of the user: one sentence that names the key or the file and the mend, exit code 2, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """What was found, what was expected, and which key to change, in one sentence."""


class RunStopped(Exception):
    """A run that must not go on: what happened, where, and what it means for the result. Exit code 1."""


def first_line(error: Exception) -> str:
    """What a library said, short enough to stand in a sentence."""
    return str(error).partition("\n")[0]
