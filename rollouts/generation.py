"""Keeps the engines at work: every group starts as soon as its lag is bounded, beside whatever the trainer does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from core.clock import in_time
from core.errors import RunStopped
from core.types import Group, Prompt
from core.workers import Workers
from rollouts.buffer import Drawn, ReplayBuffer

SILENCE_S = 5.0
"""So much later than the worker itself gives a group up does the wait for its word end."""


class Generation:
    """Asks engines for groups. `lost` counts the groups that an engine did not bring and another was asked for."""

    def __init__(
        self,
        workers: Workers,
        *,
        draw: Callable[[int], Prompt],
        keep: Callable[[Group], bool],
        buffer: ReplayBuffer,
        group_size: int,
        timeout_s: float,
    ):
        """draw: ticket -> prompt. keep: is the group worth training on? timeout_s: of one group, per attempt."""
        self.workers, self.draw, self.keep, self.buffer = workers, draw, keep, buffer
        self.group_size, self.timeout_s = group_size, timeout_s
        self.running = [0] * len(workers)
        """Groups that each engine has been asked for and not brought: one that loses some is asked for fewer."""
        self.under_way: set[asyncio.Task[None]] = set()
        self.lost = 0

    @asynccontextmanager
    async def beside(self) -> AsyncGenerator[None]:
        """Generate while the body runs. An error on either side ends the other."""
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = tasks.create_task(self._start_all(tasks))
                yield
                for task in (starting, *self.under_way):  # a resumed run of fewer steps has some that nobody wants
                    task.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _start_all(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            ticket = await self.buffer.reserve()
            task = tasks.create_task(self._bring(ticket))
            self.under_way.add(task)
            task.add_done_callback(self.under_way.discard)

    async def _bring(self, ticket: int) -> None:
        now = asyncio.get_running_loop().time  # a simulator's is not the wall clock's
        start = now()
        group = await self.ask(ticket, self.draw(ticket), self.group_size)
        self.buffer.add(Drawn(ticket=ticket, group=group, kept=self.keep(group), seconds=now() - start))

    async def ask(self, ticket: int, prompt: Prompt, size: int) -> Group:
        """A group from the engine with the least to do; a second one is asked where the first does not bring it."""
        first = self._idlest()
        group = await self._ask(first, ticket, prompt, size)
        if group is None:
            self.lost += 1
            group = await self._ask(self._idlest(besides=first), ticket, prompt, size)
        if group is None:
            raise RunStopped(
                f"the group of ticket {ticket} was asked for twice, engine {first} first, and did not come within "
                f"rollout.timeout_s={self.timeout_s:g} seconds: raise that if answers may take so long"
            )
        return group

    async def _ask(self, worker: int, ticket: int, prompt: Prompt, size: int) -> Group | None:
        """None if it did not come in time, whether the worker says so or is silent."""
        self.running[worker] += 1
        group = await in_time(self.workers.call(worker, "group", ticket, prompt, size), self.timeout_s + SILENCE_S)
        if group is not None:
            self.running[worker] -= 1
        return group

    def _idlest(self, besides: int | None = None) -> int:
        others = [i for i in range(len(self.workers)) if i != besides]
        return min(others or [0], key=lambda i: self.running[i])
