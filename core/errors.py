"""Errors for the user: one sentence with key or file and the fix, without a traceback."""

from __future__ import annotations

import difflib
import errno
import shutil
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path

from core.text.plain_text import escape_controls


class UserError(Exception):
    """User's mistake, exit code 2. The message states what is wrong, what was found, and the key to change."""


class RunStopped(Exception):
    """Reason to stop a run, exit code 1. The message states what happened, the place, and the meaning."""


class Unavailable(Exception):
    """Failed service that a sample needs besides the policy, such as a sandbox. The sample fails without a reward."""


class CallFailed(RunStopped):
    """Failed call on a worker; another worker may be the cause. Every process is alive."""

    def __init__(self, what: str, seen: str = "") -> None:
        """seen: activity of the workers at that moment."""
        # `what` is kept apart, so that the error can be raised again with a newer observation.
        super().__init__(f"{what}; {seen}" if seen else what)
        self.what = what


class TransportFailed(CallFailed):
    """Failed transfer of weights. Engines may hold old or new weights; another transport may succeed."""


class ProofFailed(RunStopped):
    """Engine that has other weights than the trainer after a sync."""


class ProcessDied(RunStopped):
    """Dead or unresponsive process of the run. The message names it."""

    run_folder: Path | None = None
    """Folder of the run, set when the run has ended."""
    steps: int = 0
    """Steps of that run."""

    def __init__(self, what: str, *, worker: tuple[str, int] | None = None) -> None:
        """worker: group and rank of the dead worker, as the driver numbers them."""
        super().__init__(what)
        self.worker = worker


MIB = 2**20
PARTIAL = ".partial"
"""Suffix of a file being written, possibly by a killed run; such a file is never read."""
# Causes outside our code; any other OSError is a bug and keeps its traceback.
_CANNOT_WRITE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR),
}
_SAID_BY_WRITERS = ("PytorchStreamWriter", "inline_container", "iostream error", "Error while serializing")
"""Words of write errors of torch and safetensors, which raise no OSError."""


@contextmanager
def writing(path: Path, *, meaning: str = "", needs: Callable[[], int] = lambda: 0) -> Generator[None]:
    """Turn a failed write (full disk, limit, missing permission) into RunStopped that names `path`.

    meaning: consequence for the user, appended to the sentence. needs: returns about how many bytes the whole takes,
    for a full disk; 0 if unknown.
    """
    try:
        yield
    # Every class: torch and safetensors report a failed write as RuntimeError or an error of their own.
    except Exception as error:
        if not is_write_error(error):
            raise
        reason = _describe_full_disk(error, path, needs()) or getattr(error, "strerror", None) or first_line(error)
        raise RunStopped(f"{path} cannot be written: {reason}" + (f"; {meaning}" if meaning else "")) from error


def _describe_full_disk(error: Exception, path: Path, needed: int) -> str:
    """Return how much was needed, and how much there was, if a write failed because the disk is full; else ""."""
    there = next(folder for folder in path.absolute().parents if folder.is_dir())
    parts = (path, path.with_name(path.name + PARTIAL))
    written = sum(file.stat().st_size for part in parts for file in (part, *part.rglob("*")) if file.is_file())
    free = shutil.disk_usage(there).free
    # torch tells no number, and a limit on the size of a file is no full disk
    is_told = isinstance(error, OSError)
    if not (error.errno in (errno.ENOSPC, errno.EDQUOT) if is_told else free < max(needed - written, MIB)):
        return ""
    asked = f"about {needed / MIB:,.2f} MiB are needed, and " if needed else ""
    return f"the disk is full: {asked}there was room for {(written + free) / MIB:,.2f} MiB"


def is_write_error(error: Exception) -> bool:
    """Tell whether an error is a failed write, of the operating system, torch or safetensors."""
    if isinstance(error, OSError):
        return error.errno in _CANNOT_WRITE
    return any(words in str(error) for words in _SAID_BY_WRITERS)


LONGEST_QUOTE = 300


def shorten(text: str) -> str:
    """Truncate text to LONGEST_QUOTE characters, to quote it in a sentence."""
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "..."


def quote(given: object) -> str:
    r"""Format a user's value for an error: one line, truncated, unprintable text as its repr.

    >>> print(quote("models/tiny"), quote("a\nb"), quote(3.0))
    models/tiny 'a\nb' 3.0
    """
    text = str(given)
    return shorten(text if text.isprintable() else repr(text))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if it is empty.

    >>> first_line(ValueError("no such row; a long explanation"))
    'no such row; a long explanation'
    >>> first_line(KeyError())
    'KeyError'
    """
    lines = (line.strip() for line in str(error).splitlines())
    return shorten(escape_controls(next(filter(None, lines), type(error).__name__), keep=""))


def name_error(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    kind, said = type(error).__name__, first_line(error)
    return kind if said == kind else f"{kind}: {said}"


def suggest_name(name: str, names: Collection[str]) -> str:
    """Return the known name closest to a misspelt one, as a clause in brackets; "" if none is close.

    >>> suggest_name("grop", ["grpo", "ppo"])
    " (did you mean 'grpo'?)"
    """
    close = find_closest(name, names)
    return f" (did you mean {close!r}?)" if close else ""


def find_closest(name: str, names: Collection[str]) -> str | None:
    """Return the known name closest to a misspelt one; None if none is close.

    >>> find_closest("gpro", ["gspo", "grpo"])
    'grpo'
    """
    close = difflib.get_close_matches(name, names, n=len(names) or 1)
    # The same letters in another order, before names of which the ratio says that they are as close.
    close.sort(key=lambda one: sorted(one) != sorted(name))
    return close[0] if close else None
