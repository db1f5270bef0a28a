"""Simulated engines on machines that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from core.errors import ProcessDied
from rollouts.scheduling.availability import ENGINE_GROUP
from rollouts.scheduling.elastic_engines import Bounds, ElasticAvailability
from tools.benchmarks.simulated_run import SimulatedEngines, Times, answer

LONGEST = 20.0
"""Seconds of a group. One that takes much longer than engines live never ends, whatever the driver does."""


class Machines(SimulatedEngines):
    """Engines on machines that come and go; each process has the version that it was last sent, and none at first.

    Ranks are slots. An engine without weights, or one that was left out of the last sync, answers with what it has.
    """

    def __init__(self, times: Times, *, least: int, most: int, concurrent: int = 4) -> None:
        super().__init__(times=times, engines=most, concurrent=concurrent)
        self.machines: dict[int, int] = {rank: rank for rank in range(least)}
        """Machine of every process, by rank."""
        self.free: set[int] = set()
        """Machines without an engine."""
        self.versions: dict[int, int] = {}
        self.generation = dict.fromkeys(range(most), 0)
        """Processes that a rank has had."""
        self.came = asyncio.Event()
        self.last: dict[int, int] = {}
        self.asked: list[tuple[int, int]] = []
        self.fails_to_start: Callable[[int], bool] = lambda rank: False
        self.calls: dict[int, set[asyncio.Future[Any]]] = {rank: set() for rank in range(most)}

    def add_machine(self, machine: int) -> None:
        self.free.add(machine)
        self.came.set()

    def kill(self, rank: int, *, machine_lives: bool = False) -> None:
        """End a process; with its machine, unless that lives."""
        self._end(rank)
        machine = self.machines.pop(rank)
        self.last[rank] = machine
        if machine_lives:
            self.add_machine(machine)

    def _end(self, rank: int) -> None:
        self.generation[rank] += 1
        self.versions.pop(rank, None)
        for call in self.calls[rank]:
            if not call.done():
                call.set_exception(ProcessDied(f"engine {rank}: its process died", worker=(ENGINE_GROUP, rank)))

    async def find_place(self, rank: int) -> bool:
        while not self.free:
            self.came.clear()
            await self.came.wait()
        machine = self.machines[rank] = min(self.free)
        self.free.remove(machine)
        return self.last.pop(rank, None) == machine

    async def build(self, rank: int) -> None:
        before = self.generation[rank]
        await asyncio.sleep(2.0)
        if self.generation[rank] != before or self.fails_to_start(rank):
            if rank in self.machines:
                self.kill(rank, machine_lives=True)
            raise ProcessDied(f"engine {rank} (build): its process died", worker=(ENGINE_GROUP, rank))

    async def release(self, rank: int) -> None:
        self._end(rank)
        self.machines.pop(rank, None)  # it may have died, and nobody has noticed

    async def check_health(self, rank: int) -> tuple[bool, str]:
        return rank in self.machines, f"engine {rank} is simulated"

    async def call_one(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        ticket = args[0]
        self.asked.append((rank, ticket))
        if rank not in self.versions:
            raise ProcessDied(f"engine {rank}: its process died", worker=(ENGINE_GROUP, rank))
        first = self.versions[rank]
        ends: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.calls[rank].add(ends)
        try:
            await asyncio.wait([ends], timeout=min(self.times.of_group(ticket), LONGEST))
            if ends.done():
                ends.result()
            return [answer(ticket, first)]
        finally:
            self.calls[rank].discard(ends)

    async def publish_weights(self, version: int, engines: Any = None) -> dict[str, float]:
        before = {rank: self.generation[rank] for rank in engines}
        await asyncio.sleep(self.times.sync)
        for rank in engines:
            if rank not in self.machines or self.generation[rank] != before[rank]:
                raise ProcessDied(f"engine {rank}: died in the sync", worker=(ENGINE_GROUP, rank))
            self.versions[rank] = version
        return {}


def elastic(machines: Machines, *, least: int, said: list[str], budget: int = 10**6, few_s: float = 1e6) -> Any:
    bounds = Bounds(least=least, most=len(machines), few_s=few_s, leave_s=500.0)
    return ElasticAvailability(bounds, machines, budget=budget, say=said.append)
