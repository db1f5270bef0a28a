"""Limit user code that blocks the event loop, in which no asyncio deadline can fire."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from core.errors import RunStopped

T = TypeVar("T")


class LimitBlocking(Generic[T]):
    """Awaitable that runs `call`, and raises RunStopped if it blocks the event loop for `seconds`.

    It needs SIGALRM, so it has no effect outside the main thread; there another process enforces a deadline.
    """

    def __init__(self, call: Awaitable[T], *, who: str, seconds: float, key: str) -> None:
        """call: awaitable to limit. who: name of the user's method. key: recipe key of `seconds`."""
        self.call, self.who, self.seconds, self.key = call, who, seconds, key

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self.call.__await__()
        if threading.current_thread() is not threading.main_thread():
            return (yield from steps)
        # Drive the coroutine by hand: only the time between two awaits is limited, not the time of the awaits.
        send: Any = None
        while True:
            try:
                with self._limit():
                    waits_for = steps.throw(send) if isinstance(send, BaseException) else steps.send(None)
            except StopIteration as done:
                return done.value
            try:
                # Errors of the awaited future, cancellation included, must reach the coroutine itself: it may catch
                # them.
                send = yield waits_for
            except (Exception, asyncio.CancelledError) as error:
                send = error

    @contextmanager
    def _limit(self) -> Generator[None]:
        # A signal is the only way to interrupt code that never returns to the event loop.
        before = signal.signal(signal.SIGALRM, self._stop)
        outer_s, _ = signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, outer_s)  # of a limit around this one; 0 where there is none

    def _stop(self, number: int, frame: FrameType | None) -> None:
        where = f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})" if frame is not None else ""
        raise RunStopped(
            f"{self.who} blocked the process for {self.key}={self.seconds:g} seconds without an await{where}; await "
            "slow calls, or run them by asyncio.to_thread"
        )
