"""Mistakes of the user: one sentence that names the key or the file and the mend, exit code 2, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """What was found, what was expected, and which key to change, in one sentence."""


class RunStopped(Exception):
    """A run that must not go on: what happened, where, and what it means for the result. Exit code 1."""


class CallFailed(RunStopped):
    """A call on a worker failed for a reason that may lie with another one, and every process is alive."""

    def __init__(self, what: str, seen: str = "") -> None:
        """seen: what the workers were doing at that moment."""
        super().__init__(f"{what}; {seen}" if seen else what)
        self.what = what


class TransportFailed(CallFailed):
    """Weights did not get through. It says nothing of what an engine holds: another transport may bring them."""


class ProcessDied(RunStopped):
    """A process of the run is gone, or gives no sign of life: the sentence names it."""


def first_line(error: Exception) -> str:
    """What a library said, short enough to stand in a sentence."""
    return str(error).partition("\n")[0]
