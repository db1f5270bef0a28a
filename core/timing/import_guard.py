"""A deadline for the import of a user's file, which may hold an endless loop."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from core.timing.deadlines import IMPORT_TIMEOUT_S, PROGRESS_EVERY_S
from core.timing.progress import say


class ImportTooSlow(BaseException):
    """Import that is over its deadline. No Exception: `except Exception` in the file must not swallow it."""


@contextmanager
def limit_import(path: Path) -> Generator[None]:
    """Raise ImportTooSlow where the body takes longer than IMPORT_TIMEOUT_S; until then say now and then where it is.

    Signals reach the main thread only. In another thread, such as that of a Ray actor, nothing is done: the driver has
    imported the same file before, and the call that loads it has a deadline of its own.
    Time at a breakpoint does not count.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ticks = 0

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal ticks
        if _is_debugging(frame):
            return
        ticks += 1
        if ticks * PROGRESS_EVERY_S >= IMPORT_TIMEOUT_S:
            raise ImportTooSlow
        say(f"{path}{_line_of(frame, path)}: its import has taken {ticks * PROGRESS_EVERY_S:g} s so far")

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, look)
    left, interval = signal.setitimer(signal.ITIMER_REAL, PROGRESS_EVERY_S, PROGRESS_EVERY_S)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is look:  # else the file has taken the signal for itself
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if left:  # somebody else's timer goes on
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


def _is_debugging(frame: FrameType | None) -> bool:
    """Tell whether a debugger is at work: it traces this thread, or its prompt is on the stack."""
    if sys.gettrace() is not None or "pydevd" in sys.modules:
        return True
    while frame is not None:
        if frame.f_globals.get("__name__") in ("bdb", "pdb"):
            return True
        frame = frame.f_back
    return False


def _line_of(frame: Any, path: Path) -> str:
    while frame is not None:
        if frame.f_code.co_filename == str(path):
            return f", line {frame.f_lineno}"
        frame = frame.f_back
    return ""
