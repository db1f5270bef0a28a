"""One timeout for many calls, with one timer: asyncio slows down where each of a hundred thousand calls has its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import takewhile
from typing import TypeVar

T = TypeVar("T")


class SharedTimeout:
    """Timeout of many calls on one event loop. Each may take this long from when it is awaited."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._ends: dict[asyncio.Timeout, float] = {}
        """End of every call that is awaited, the earliest first: all have the same time."""
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, call: Awaitable[T]) -> T | None:
        """Await `call`; on timeout cancel it and return None. A TimeoutError that it raises itself is raised."""
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                self._watch(deadline)
                try:
                    return await call
                finally:
                    self._unwatch(deadline)
        except TimeoutError:
            if deadline.expired():
                return None
            raise

    def _watch(self, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        self._ends[deadline] = loop.time() + self.seconds
        if self._timer is None:
            self._set_timer(loop)

    def _unwatch(self, deadline: asyncio.Timeout) -> None:
        self._ends.pop(deadline, None)  # one that has expired is not there any more
        if self._timer is not None and not self._ends:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        first = next(iter(self._ends.values()), None)
        self._timer = None if first is None else loop.call_at(first, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for deadline in [*takewhile(lambda one: self._ends[one] <= now, self._ends)]:
            del self._ends[deadline]
            deadline.reschedule(now)
        self._set_timer(loop)
