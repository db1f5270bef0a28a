"""Seconds of the engines by activity, over their restarts: a new process begins at zero, and its engine goes on."""

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
    """Reader of the timers of all engines. The seconds of a process that died are those that were read last."""

    def __init__(self, workers: Workers[RolloutWorker], engines: EngineAvailability):
        self.timers: Workers[ActivityTimer] = workers.attribute("timer")
        self.engines = engines
        self.last: list[dict[int, Seconds]] = [{} for _ in range(len(workers))]
        """What each engine's processes said last, by the number of deaths before them."""

    async def read(self) -> dict[int, Seconds]:
        """Return the seconds of every engine by activity, with those that it was away, by rank.

        Engines that have not joined yet are left out.
        """
        await asyncio.gather(*(self._read_one(rank) for rank in self.engines.running()))
        return {rank: self._add_up(rank) for rank in self.engines.ever_running()}

    async def _read_one(self, rank: int) -> None:
        deaths = self.engines.deaths
        try:
            self.last[rank][deaths[rank]] = await self.timers.call_one(rank, ActivityTimer.read_seconds)
        except ProcessDied as death:
            self.engines.report_death(death, deaths)

    def _add_up(self, rank: int) -> Seconds:
        total: Seconds = {}
        for seconds in self.last[rank].values():
            total = {name: total.get(name, 0.0) + value for name, value in seconds.items()}
        return total | {Activity.RESTART: self.engines.away_s(rank)}
