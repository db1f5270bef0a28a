"""Errors that a user sees: one sentence that names the key or the file and the fix, and no traceback."""

from __future__ import annotations


class UserError(Exception):
    """Mistake of the user, exit code 2. The message says what was found, what was expected, and which key to change."""


class RunStopped(Exception):
    """Reason why a run must stop, exit code 1. The message says what happened, where, and what it means."""


class CallFailed(RunStopped):
    """Failed call on a worker, possibly because of another worker. Every process is alive."""

    def __init__(self, what: str, seen: str = "") -> None:
        """seen: what the workers were doing at that moment."""
        super().__init__(f"{what}; {seen}" if seen else what)
        self.what = what


class TransportFailed(CallFailed):
    """Failed transfer of weights. Engines may hold old or new weights; another transport may succeed."""


class ProcessDied(RunStopped):
    """Process of the run that is gone or does not respond. The message names it."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, to quote it in a sentence."""
    return str(error).partition("\n")[0]
