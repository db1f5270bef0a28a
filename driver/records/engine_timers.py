"""Seconds of the engines by activity, across restarts: a new process starts at zero, but the engine continues."""

from __future__ import annotations

import asyncio

from core.cluster.workers import Workers
from core.errors import ProcessDied
from core.timing.clock import ActivityTimer
from core.timing.phases import Activity
from rollouts.scheduling.availability import EngineAvailability
from rollouts.worker import RolloutWorker

Seconds = dict[str, float]


class EngineTimers:
    """Reader of all engines' timers. A dead process counts with its last reading."""

    def __init__(self, workers: Workers[RolloutWorker], engines: EngineAvailability):
        self.timers: Workers[ActivityTimer] = workers.attribute("timer")
        self.engines = engines
        self.last: list[dict[int, Seconds]] = [{} for _ in range(len(workers))]
        """Last reading of each engine's processes, by number of preceding deaths."""

    async def read(self) -> dict[int, Seconds]:
        """Return seconds by activity of every engine that has joined, by rank, with the seconds of its absence."""
        await asyncio.gather(*(self._read_one(rank) for rank in self.engines.running()))
        return {rank: self._add_up(rank) for rank in self.engines.ever_running()}

    async def _read_one(self, rank: int) -> None:
        # Read before the call: a death during it must not attribute this reading to the new process.
        deaths = self.engines.deaths
        try:
            self.last[rank][deaths[rank]] = await self.timers.call_one(rank, ActivityTimer.read_seconds)
        except ProcessDied as death:
            self.engines.report_death(death, deaths)

    def _add_up(self, rank: int) -> Seconds:
        total: Seconds = {}
        # Each process of the engine started its timer at zero, so their last readings add up.
        for seconds in self.last[rank].values():
            total = {name: total.get(name, 0.0) + value for name, value in seconds.items()}
        return total | {Activity.RESTART: self.engines.away_s(rank)}
