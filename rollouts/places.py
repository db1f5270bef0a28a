"""Places of the episodes that an engine runs at the same time (rollout.max_concurrency)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class EpisodeTimedOut(Exception):
    """An episode did not end in the time that it has from the place on."""


class Places:
    """Places of running episodes. With a limit, an episode's deadline starts with its place.

    So a group does not time out because it waits for episodes of other groups.
    """

    def __init__(self, limit: int | None, timeout_s: float) -> None:
        """limit: number of places; None for any number, where the deadline is that of the group."""
        self.limit, self._timeout_s = limit, timeout_s
        self._free = None if limit is None else asyncio.Semaphore(limit)

    @asynccontextmanager
    async def take(self) -> AsyncGenerator[None]:
        """Wait for a place, and keep it while the body runs. Raises EpisodeTimedOut."""
        if self._free is None:
            yield
            return
        async with self._free:
            deadline = asyncio.timeout(self._timeout_s)
            try:
                async with deadline:
                    yield
            except TimeoutError as error:
                if deadline.expired():
                    raise EpisodeTimedOut from error
                raise
