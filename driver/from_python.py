"""Run from Python; inside an event loop, such as a notebook's, the run gets a thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from core.cluster.signals import SIGNALS, pass_on_interrupt

T = TypeVar("T")


def call_from_python(run: Callable[[], T]) -> T:
    """Return the result of `run` or raise its error; the caller's signal handlers are restored afterwards."""
    # Only the main thread may set signal handlers, so there are none to restore.
    if threading.current_thread() is not threading.main_thread():
        return run()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        # asyncio.run refuses to start inside a running event loop.
        return _in_thread(run) if _has_event_loop() else run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # there is none
        return False
    return True


def _in_thread(run: Callable[[], T]) -> T:
    """Call `run` in a thread; Ctrl-C, received by this thread, stops the run gracefully."""
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(run())
        except BaseException as error:  # whatever it is, the caller gets it
            outcome.set_exception(error)

    for number in SIGNALS:
        # Signals reach this thread, and the run is in the other one.
        signal.signal(number, lambda *_: pass_on_interrupt())
    thread = threading.Thread(target=call, daemon=True, name="run")
    thread.start()
    thread.join()
    return outcome.result()
