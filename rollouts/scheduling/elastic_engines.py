"""Elastic engines: they join and leave during a run, `rollout.num_engines: {min: 1, max: 8}`.

There are `max` slots. A slot without an engine waits for a place in the cluster, on a new or a returned machine.

    waits for a place -> is started -> needs weights -> serves -> leaves -> waits for a place -> ...

An engine joins at a weight sync, after the same verification as all others. If its machine is about to go, it receives
no more groups and weights, and leaves when the last group is done. A killed engine is handled as in
rollouts/scheduling/availability.py: other engines repeat its groups.

Guarantees of the schedule do not depend on membership. Tickets belong to the driver, and staleness is bounded at the
start of a group. A leaving engine finishes the groups with the weights they started with, or later ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from core.errors import ProcessDied, RunStopped, UserError
from rollouts.scheduling.availability import ENGINE_GROUP, EngineAvailability, EngineState, Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits on the number of engines, and two deadlines."""

    least: int
    """rollout.num_engines.min: these ranks exist from the start."""
    most: int
    """rollout.num_engines.max."""
    few_s: float
    """Seconds with fewer than `least` engines after which the run ends."""
    leave_s: float
    """Seconds after which a leaving engine is ended with its groups. Other engines repeat them."""


class WorkerSlots(Protocol):
    """Engine processes by rank. A rank is a slot for successive engines."""

    async def find_place(self, rank: int) -> bool:
        """Start a process when there is a free place, after ending the previous process.

        Return True if the previous process died and the new process runs on the same machine.
        """
        ...

    async def build(self, rank: int) -> None:
        """Build the engine in the started process."""
        ...

    async def release(self, rank: int) -> None:
        """End the process of a rank."""
        ...


class ElasticAvailability(EngineAvailability):
    """States of elastic engines."""

    def __init__(
        self, bounds: Bounds, slots: WorkerSlots, *, budget: int = 0, say: Callable[[str], None] = print
    ) -> None:
        """Start with the first `least` ranks. budget: maximum number of deaths on living machines."""
        self.bounds, self._seats = bounds, slots
        self._joined = {*range(bounds.least)}
        self._n_died = self._n_spent = 0
        self._idle: dict[Process, asyncio.Event] = {}
        """Set when a leaving process has no more groups, or is gone."""
        self._too_few: asyncio.TimerHandle | None = None
        # after the fields above, which the base class reads through _note_states
        super().__init__(bounds.most, budget=budget, say=say)
        for rank in range(bounds.least, bounds.most):
            # an empty slot waits for a place, like a dead engine
            self.states[rank] = EngineState.RESTARTING
        self._note_states()

    @property
    def can_restart(self) -> bool:
        return True

    @property
    def _replaces_dead(self) -> bool:
        return True

    @property
    def n_restarts(self) -> int:
        return self._n_died

    def ever_running(self) -> list[int]:
        return sorted(self._joined)

    def open_slots(self) -> None:
        """Allow engines to join."""
        for rank in range(self.bounds.least, self.bounds.most):
            self._start_task(self._bring_back(rank))

    def start_watch(self, find_leaving: Callable[[], Awaitable[Mapping[int, str]]], *, every_s: float) -> None:
        """Poll for departing machines, and drain their engines.

        find_leaving: returns the ranks on departing machines, each with a reason.
        """

        async def watch() -> None:
            while True:
                for rank, why in (await find_leaving()).items():
                    self.drain(rank, why)
                await asyncio.sleep(every_s)

        self._start_task(self._guard(watch()))

    def drain(self, rank: int, why: str) -> None:
        """Drain an engine: no more groups or weights. The slot becomes free when the last group is done."""
        if self.states[rank] in (EngineState.SERVING, EngineState.NEEDS_WEIGHTS):
            process = self.process_of(rank)
            n = self.groups[rank]
            self._say(f"engine {rank} leaves{f', when its {n} groups are done' if n else ''}: {why}")
            idle = self._idle[process] = asyncio.Event()
            self._set_state(rank, EngineState.LEAVING)
            # the event is handed over: if the process dies before the task runs, _lose() has removed it
            self._start_task(self._guard(self._let_go(process, idle)))

    def end_group(self, process: Process) -> None:
        super().end_group(process)
        if process in self._idle and not self.groups[process[0]]:
            self._idle[process].set()

    async def _let_go(self, process: Process, idle: asyncio.Event) -> None:
        """End a drained engine, unless it dies first."""
        rank, _ = process
        if self.groups[rank]:
            with suppress(TimeoutError):
                await asyncio.wait_for(idle.wait(), self.bounds.leave_s)
        # a sync counts on every engine that it started with
        await self.wait_for(lambda: [] if self._in_sync else [rank])
        # a process that died meanwhile has been replaced already
        if self.process_of(rank) == process:
            self._lose(rank)  # before it ends: a group that it takes with it is no death
            await self._seats.release(rank)
            await self._bring_back(rank)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`. An error is raised to whoever waits for engines."""
        try:
            await work
        except Exception as error:
            self._failure = error
            self._changed.set()

    def _note_death(self, rank: int, death: ProcessDied) -> None:
        """Log a death. Whether it counts towards the budget is known when the next process finds a place."""
        self._n_died += 1
        self._say(f"{death}; its groups are generated again, and its slot waits for a place")

    def _lose(self, rank: int) -> None:
        if (idle := self._idle.pop(self.process_of(rank), None)) is not None:
            idle.set()
        super()._lose(rank)

    async def _bring_back(self, rank: int) -> None:
        """Fill a slot when there is a free place. If the machine is refused, the slot stays empty."""
        await self._guard(self._fill(rank))

    async def _fill(self, rank: int) -> None:
        try:
            while not await self._start_engine(rank):
                self._count_process(rank)
        except UserError as refused:
            self._say(f"engine {rank} cannot join, and its slot stays empty: {refused}")
            await self._seats.release(rank)
            return
        self._set_state(rank, EngineState.NEEDS_WEIGHTS)
        self._changed.set()

    async def _start_engine(self, rank: int) -> bool:
        """Start an engine. Return False if the process died meanwhile. Raises ProcessDied if the budget is used up."""
        try:
            died_here = await self._seats.find_place(rank)
        except ProcessDied as death:
            self._note_death(rank, death)
            self._spend(rank)
            return False
        # An engine that went with its machine costs nothing. Only deaths on living machines may be a bug.
        if died_here:
            self._spend(rank)
        try:
            await self._seats.build(rank)
        except ProcessDied as death:
            self._note_death(rank, death)
            return False
        return True

    def _spend(self, rank: int) -> None:
        """Count a death on a living machine. Raises ProcessDied if the budget is used up."""
        self._n_spent += 1
        if self._n_spent > self._budget:
            raise ProcessDied(
                f"engine {rank} died while its machine lives, and rollout.restarts={self._budget} were used up before",
                worker=(ENGINE_GROUP, rank),
            )

    def _say_back(self, rank: int, weights: str) -> None:
        what = "is back" if rank in self._joined else "has joined"
        self._joined.add(rank)
        # + 1: the engine is not yet marked as serving
        self._say(f"engine {rank} {what}{weights}; {len(self.serving()) + 1} of {self.bounds.most} engines serve")

    def _note_states(self) -> None:
        super()._note_states()
        # called at every change of state: the timer runs while there are too few engines
        if len(self.taking_weights()) >= self.bounds.least:
            if self._too_few is not None:
                self._too_few.cancel()
                self._too_few = None
        elif self._too_few is None:
            self._too_few = asyncio.get_running_loop().call_later(self.bounds.few_s, self._give_up)

    def _give_up(self) -> None:
        self._failure = RunStopped(
            f"for {self.bounds.few_s:g} seconds (timeout_s) there were fewer engines than rollout.num_engines.min="
            f"{self.bounds.least}, at last {len(self.taking_weights())}: give the cluster machines, or lower it"
        )
        self._changed.set()

    async def stop(self) -> None:
        if self._too_few is not None:
            self._too_few.cancel()
        await super().stop()
