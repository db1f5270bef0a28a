"""Deadline for the import of a user's file, which may contain an endless loop."""

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
    """Import over its deadline. A BaseException, so that `except Exception` in the file cannot catch it."""


@contextmanager
def limit_import(path: Path) -> Generator[None]:
    """Raise ImportTooSlow after IMPORT_TIMEOUT_S of the body; until then report the current line at intervals.

    Does nothing outside the main thread, such as in a Ray actor, because signals reach only the main thread. There the
    calling process has a deadline, and the driver has imported the same file before. Time at a breakpoint does not
    count.
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
        # Ticks count, not seconds: a user may spend an hour at a breakpoint.
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
                # At least 1 ms, because 0 would switch that timer off.
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


def _is_debugging(frame: FrameType | None) -> bool:
    """Tell whether a debugger traces this thread or shows a prompt."""
    # pydevd is the debugger of PyCharm and VS Code; it may work without a trace function.
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
