"""What Ctrl-C and SIGTERM do: the first ends the run in order, the second is told so, the third ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODE = 130


_elsewhere: list[Callable[[], object]] = []
"""How to end a run that is in another thread, in order."""


def pass_on_interrupt() -> None:
    """End the run that is in another thread. Raises KeyboardInterrupt where that has not begun or is over."""
    if not _elsewhere:
        raise KeyboardInterrupt
    _elsewhere[0]()


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def interrupt_start() -> None:
    """Raise KeyboardInterrupt; in the middle of an import, where it could become any other error, end the process.

    This is for a program that has not started anything yet.
    """
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]: the documented way
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)
        frame = frame.f_back
    raise KeyboardInterrupt


def end_on_signals(*, first: Callable[[], object] = raise_interrupt, at_once: Callable[[], None] | None = None) -> None:
    """Call `first` at the first signal from now on, and `at_once` at the third, after which the process is gone.

    Signals that are ignored stay so.
    """
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        _elsewhere[:] = [first]
        return
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            first()
        elif len(seen) == 2:
            print("the run is ending; once more, and it ends at once", file=sys.stderr, flush=True)
        else:
            if at_once is not None:
                at_once()
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)
