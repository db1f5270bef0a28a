"""First Ctrl-C or SIGTERM: stop gracefully. Second: print that the run is stopping. Third: exit now."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODE = 130


_elsewhere: list[Callable[[], object]] = []
"""Callback that ends the run, if the run is in another thread."""


def pass_on_interrupt() -> None:
    """End the run of another thread. Raises KeyboardInterrupt if there is none at the moment."""
    if not _elsewhere:
        raise KeyboardInterrupt
    _elsewhere[0]()


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def interrupt_start() -> None:
    """Raise KeyboardInterrupt; during an import, end the process instead.

    Use it only before the program has started anything.
    """
    # Libraries catch errors of optional imports: there KeyboardInterrupt could become any other error.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)
        frame = frame.f_back
    raise KeyboardInterrupt


def end_on_signals(*, first: Callable[[], object] = raise_interrupt, at_once: Callable[[], None] | None = None) -> None:
    """Install handlers: call `first` at the first signal, and `at_once` before the exit at the third.

    Ignored signals stay ignored.
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
            # No clean-up of Python's, which may be what hangs. The guardian removes what is left.
            if at_once is not None:
                at_once()
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)

    for number in SIGNALS:
        # nohup and shells' background jobs ignore signals on purpose.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)
