"""Turns of a judge on the devices of the engines: episodes of all groups, then their rewards, and no both at once.

A group that is played waits until no other is, and the judge wakes for all of them. When the last has its rewards, the
judge sleeps. Groups that begin meanwhile, such as those of an evaluation, wait for that.

A group may be cancelled at any time. A switch that it has begun goes on to the end, because others need the devices in
a known state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

from core.tasks import run_to_end


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
            await run_to_end(self._devices.resume_engines())
            self._playing += 1
        try:
            yield
        finally:
            await run_to_end(self._stop_playing())

    @asynccontextmanager
    async def judging(self) -> AsyncGenerator[None]:
        """Keep the judge awake while the body computes the rewards of a group."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._playing)
            if not self._judging:
                try:
                    await run_to_end(self._devices.begin_judging())
                except asyncio.CancelledError:
                    # the judge is awake by now, and nobody asks it
                    await run_to_end(self._devices.end_judging())
                    raise
            self._judging += 1
        try:
            yield
        finally:
            await run_to_end(self._stop_judging())

    async def _stop_playing(self) -> None:
        async with self._changed:
            self._playing -= 1
            self._changed.notify_all()

    async def _stop_judging(self) -> None:
        async with self._changed:
            self._judging -= 1
            if not self._judging:
                await self._devices.end_judging()
            self._changed.notify_all()
