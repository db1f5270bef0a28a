"""Timeouts that return a value instead of raising: of an awaited call, and of a probe that blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from core.errors import first_line

T = TypeVar("T")


async def wait_or_cancel(call: Awaitable[T], seconds: float | None) -> T | None:
    """Await `call`; on timeout cancel it and return None. A TimeoutError of the call itself propagates.

    seconds: None for no timeout.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await call
    except TimeoutError:
        # Both raise TimeoutError; only the deadline object knows whose it is.
        if deadline.expired():
            return None
        raise


def probe_with_timeout(ask: Callable[[], str | None], *, timeout_s: float, silence: str) -> str:
    """Return why `ask` failed: its result or error, or `silence` after `timeout_s` seconds; "" on success."""
    # The last entry counts. It is `silence` only as long as the thread has added none.
    failures = [silence]

    def run() -> None:
        try:
            failures.append(ask() or "")
        except Exception as error:  # a border: whatever a client, a proxy or the certificates raise
            failures.append(first_line(error))

    # Some clients wait in places that their own timeout does not cover. A thread can be abandoned there.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return failures[-1]
