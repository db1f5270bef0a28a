"""Errors that a user sees: one sentence that names the key or the file and the fix, and no traceback."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


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

    run_folder: Path | None = None
    """Folder of the run that it was part of, once that has ended."""
    steps: int = 0
    """Steps of that run."""

    def __init__(self, what: str, *, worker: tuple[str, int] | None = None) -> None:
        """worker: group and rank of the worker whose process it was, as seen from the driver."""
        super().__init__(what)
        self.worker = worker


_CANNOT_WRITE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR),
}
_SAID_BY_WRITERS = ("PytorchStreamWriter", "inline_container", "iostream error", "Error while serializing")
"""Words of torch's and safetensors' errors about a failed write, which are no OSError."""


@contextmanager
def writing(path: Path, *, meaning: str = "") -> Generator[None]:
    """Turn a failed write (a full disk, a limit, a lost right) into RunStopped that names `path`.

    meaning: what it means for the user, at the end of the sentence.
    """
    try:
        yield
    except Exception as error:
        if not is_write_error(error):
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RunStopped(f"{path} cannot be written: {reason}" + (f"; {meaning}" if meaning else "")) from error


def is_write_error(error: Exception) -> bool:
    """Tell whether the error is a failed write; torch and safetensors have their own classes for it."""
    if isinstance(error, OSError):
        return error.errno in _CANNOT_WRITE
    return any(words in str(error) for words in _SAID_BY_WRITERS)


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
