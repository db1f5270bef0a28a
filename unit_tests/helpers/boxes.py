"""Boxes of tests: opened for one function, and closed after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollouts.boxes import BoxSpec, open_box
from rollouts.boxes.base import Box

T = TypeVar("T")


def within(spec: BoxSpec, use: Callable[[Box], Awaitable[T]], *, backend: str = "bubblewrap") -> T:
    """Return the result of a function of a box."""

    async def run() -> T:
        box = await open_box(backend, spec)
        try:
            return await use(box)
        finally:
            await box.close()

    return asyncio.run(run())


async def sh(box: Box, command: str, *, seconds: float = 20.0) -> str:
    """Return the output of a command, and the limit that ended it."""
    ran = await box.run(["sh", "-c", command], seconds=seconds)
    return (ran.stdout + ran.stderr).decode() + (f"[{ran.killed_for}]" if ran.killed_for else "")
