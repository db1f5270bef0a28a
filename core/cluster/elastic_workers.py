"""Ray workers that join and leave during a run; a slot is a rank in which actors succeed each other.

An actor waits until the cluster has room: on a new machine or a returned one. These workers form no process group.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

from core.cluster.ray_workers import Remote
from core.errors import ProcessDied
from core.patches import list_draining_nodes
from core.tasks import gather_fail_fast
from core.timing.deadlines import CLOSE_TIMEOUT_S

W_co = TypeVar("W_co", covariant=True)


class ElasticWorkers(Remote[W_co]):
    """Workers with empty slots: `actors` contains None there."""

    nodes: dict[int, str]
    """Ray id of the machine of each rank's last process."""

    async def add_slots(self, n: int) -> None:
        """Add empty slots; called once, after the first workers are built."""
        placed = await gather_fail_fast(self._call_actor(rank, "read_node") for rank in self.ranks)
        self.nodes = dict(enumerate(placed))
        self.actors.extend([None] * n)
        self.ranks = range(len(self.actors))

    def peers_of(self, rank: int) -> Iterable[Remote[W_co]]:
        """Yield only the worker itself: no other process can cause its failure."""
        yield self.only([rank])

    async def find_place(self, rank: int) -> bool:
        """Replace the rank's actor, and wait without a deadline until Ray has placed it.

        Returns True if it is on the same machine as the last actor, which died there.
        """
        self.restarting.add(rank)
        self.started.discard(rank)
        self._kill(rank)
        self.actors[rank] = self.start_actor(rank)
        # No deadline: a cluster may have no free machine for hours, and the run continues without this worker.
        node = await self.with_deadline(math.inf, key="")._call_actor(rank, "read_node")
        before, self.nodes[rank] = self.nodes.get(rank), node
        return node == before

    async def build(self, rank: int) -> None:
        """Build the worker of a placed actor. Raises the errors of `build_workers`."""
        await self.build_again(rank)
        self.restarting.discard(rank)

    async def release(self, rank: int) -> None:
        """Close a worker, then kill the actor."""
        from ray.exceptions import RayError

        self.restarting.add(rank)
        self.nodes.pop(rank, None)
        with suppress(RayError, TimeoutError):  # it is killed next
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                # Not through `_call_actor`: a worker that leaves may fail here without ending the run.
                await self.actors[rank].call.remote("close")
        self._kill(rank)
        self.slots.give_up(rank)

    async def find_leaving(self) -> dict[int, str]:
        """Return ranks on machines that Ray will soon remove (preemption, `ray drain-node`), with a clause each."""
        # In a thread, because the request to Ray's head blocks, and the event loop must turn.
        draining = await asyncio.to_thread(list_draining_nodes)
        return {rank: "its machine is to go" for rank, node in self.nodes.items() if node in draining}

    async def check_health(self, rank: int) -> tuple[bool, str]:
        if self.actors[rank] is None:
            return False, f"{self.slots.name_worker(rank)} has left"
        return await super().check_health(rank)

    async def _call_actor(self, rank: int, what: str, *args: Any, **kwargs: Any) -> Any:
        if self.actors[rank] is None:
            raise ProcessDied(f"{self.slots.name_worker(rank)} has left", worker=(self.name, rank))
        return await super()._call_actor(rank, what, *args, **kwargs)

    def _kill(self, rank: int) -> None:
        import ray

        actor, self.actors[rank] = self.actors[rank], None
        if actor is not None:
            ray.kill(actor)
