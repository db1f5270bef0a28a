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


LONGEST_QUOTE = 300


def shorten(text: str) -> str:
    """Return text that is short enough to be quoted in a sentence."""
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "..."


def quote(given: object) -> str:
    r"""Return what a user wrote on one line and shortened; as it is where it can be printed so.

    >>> print(quote("models/tiny"), quote("a\nb"), quote(3.0))
    models/tiny 'a\nb' 3.0
    """
    text = str(given)
    return shorten(text if text.isprintable() else repr(text))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, to quote it in a sentence; the error's type if it says nothing.

    >>> first_line(ValueError("no such row; a long explanation"))
    'no such row; a long explanation'
    >>> first_line(KeyError())
    'KeyError'
    """
    lines = (line.strip() for line in str(error).splitlines())
    return shorten(next(filter(None, lines), type(error).__name__))


def name_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    kind, said = type(error).__name__, first_line(error)
    return kind if said == kind else f"{kind}: {said}"
