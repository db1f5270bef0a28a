"""Timeout of an awaited call that returns None instead of raising."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def wait_or_cancel(call: Awaitable[T], seconds: float) -> T | None:
    """Await `call`; on timeout cancel it and return None. A TimeoutError of the call itself propagates."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await call
    except TimeoutError:
        if deadline.expired():
            return None
        raise
