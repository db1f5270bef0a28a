"""Find the root cause of a failed actor call: its own exception, or the death of a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Protocol, TypeVar

from core.cluster.actor import IDLE
from core.errors import CallFailed, ProcessDied

T = TypeVar("T")


class Watched(Protocol):
    """Workers with a health check: core.cluster.ray_workers.Remote."""

    name: str
    ranks: Sequence[int]
    restarting: set[int]

    async def check_health(self, rank: int) -> tuple[bool, str]: ...


async def attribute_failure(groups: Iterable[Watched], call: Awaitable[T]) -> T:
    """Await `call`; if it fails because a process of `groups` died or is stopped, raise ProcessDied naming that
    process.
    """
    from ray.exceptions import RayTaskError

    try:
        return await call
    except (CallFailed, RayTaskError) as error:
        # A broken collective raises on every rank. Only a health check of all ranks finds the process that broke it.
        ranks = [(group, rank) for group in groups for rank in group.ranks]
        checked = [(group, rank) for group, rank in ranks if rank not in group.restarting]
        restarting = [(group, rank) for group, rank in ranks if rank in group.restarting]
        health = await asyncio.gather(*(group.check_health(rank) for group, rank in checked))
        for (group, rank), (alive, clause) in zip(checked, health, strict=True):
            if not alive:
                raise ProcessDied(clause, worker=(group.name, rank)) from error
        # Only after the dead: an actor that is being replaced cannot be asked, but explains a failed call.
        if restarting and isinstance(error, CallFailed):
            group, rank = restarting[0]
            raise ProcessDied(f"{group.name} {rank} is being restarted", worker=(group.name, rank)) from error
        if isinstance(error, CallFailed):
            busy = [clause for _, clause in health if not clause.endswith(IDLE)]
            raise type(error)(error.what, ", ".join(busy)) from error
        raise
