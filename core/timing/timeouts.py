"""A timeout that is an answer and no error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def wait_or_cancel(call: Awaitable[T], seconds: float) -> T | None:
    """Await `call`; after `seconds` cancel it and return None. A TimeoutError that it raises itself is raised."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await call
    except TimeoutError:
        if deadline.expired():
            return None
        raise
