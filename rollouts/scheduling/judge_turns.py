"""Turns of a judge on the devices of the engines: episodes of all groups, then their rewards, and no both at once.

A group that is played waits until no other is, and the judge wakes for all of them. When the last has its rewards, the
judge sleeps. Groups that begin meanwhile, such as those of an evaluation, wait for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol


class JudgeDevices(Protocol):
    """Devices that engines and judge share; see driver/rl/colocation.py."""

    async def begin_judging(self) -> None: ...
    async def end_judging(self) -> None: ...
    async def resume_engines(self) -> None: ...


class JudgeTurns:
    """Counter of the groups that need the engines, and of those that need the judge."""

    def __init__(self, devices: JudgeDevices) -> None:
        self._devices = devices
        self._changed = asyncio.Condition()
        self._playing = self._judging = 0

    @asynccontextmanager
    async def playing(self) -> AsyncGenerator[None]:
        """Keep the engines awake while the body plays the episodes of a group."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._judging)
            await self._devices.resume_engines()
            self._playing += 1
        try:
            yield
        finally:
            async with self._changed:
                self._playing -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def judging(self) -> AsyncGenerator[None]:
        """Keep the judge awake while the body computes the rewards of a group."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._playing)
            if not self._judging:
                await self._devices.begin_judging()
            self._judging += 1
        try:
            yield
        finally:
            async with self._changed:
                self._judging -= 1
                if not self._judging:
                    await self._devices.end_judging()
                self._changed.notify_all()
