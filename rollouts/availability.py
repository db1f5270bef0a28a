"""Engines that die and come back: which of them may be asked, and which wait for weights.

An engine serves, until its process dies. Then its unfinished groups are asked again, of the others; it is restarted in
the background, waits for the current weights, which the training loop sends while the trainers are idle, and serves
again. `rollout.restarts` bounds how often, over all engines of a run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto

from core.errors import ProcessDied

ENGINE_GROUP = "engine"
"""Name of the engines' group of workers."""


class EngineState(Enum):
    """State of one engine."""

    SERVING = auto()
    RESTARTING = auto()
    NEEDS_WEIGHTS = auto()
    """Restarted, and without the current weights."""


class EngineAvailability:
    """States of the engines of a run. It belongs to one event loop, without threads."""

    def __init__(
        self,
        n: int,
        *,
        restart: Callable[[int], Awaitable[None]] | None = None,
        budget: int = 0,
        say: Callable[[str], None] = print,
    ):
        """restart: replaces the worker of a rank; None where none can be. budget: restarts that are allowed."""
        self.states = [EngineState.SERVING] * n
        self.deaths = [0] * n
        """Deaths of each engine so far. Who asks an engine keeps this number, to tell later which process it was."""
        self._away_s = [0.0] * n
        self._restart, self._budget, self._say = restart, budget, say
        self._died_at = [0.0] * n
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    @property
    def can_restart(self) -> bool:
        return self._restart is not None and self._budget > 0

    @property
    def n_restarts(self) -> int:
        return sum(self.deaths)

    def serving(self) -> list[int]:
        """Return the ranks that may be asked for groups."""
        return [rank for rank, state in enumerate(self.states) if state is EngineState.SERVING]

    def running(self) -> list[int]:
        """Return the ranks whose worker can be called."""
        return [rank for rank, state in enumerate(self.states) if state is not EngineState.RESTARTING]

    def needing_weights(self) -> list[int]:
        """Return the ranks that were restarted and wait for weights."""
        return [rank for rank, state in enumerate(self.states) if state is EngineState.NEEDS_WEIGHTS]

    def away_s(self, rank: int) -> float:
        """Return the seconds that an engine was away: from its deaths until it had weights again."""
        is_away = self.states[rank] is not EngineState.SERVING
        return self._away_s[rank] + (time.perf_counter() - self._died_at[rank] if is_away else 0.0)

    async def wait_for(self, ranks: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return `ranks()` as soon as it is not empty. Raises the error that ended a restart."""
        while not (found := ranks()):
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()
        self._raise_failure()
        return found

    def report_death(self, death: ProcessDied, deaths: Sequence[int]) -> None:
        """Restart the engine that died. Raises `death` where it was no engine, or none may be restarted any more.

        deaths: the numbers of deaths when it was asked; if its rank has died since, this is known already.
        """
        self._raise_failure()
        if self._restart is None or death.worker is None or death.worker[0] != ENGINE_GROUP:
            raise death
        rank = death.worker[1]
        if self.deaths[rank] != deaths[rank] or self.states[rank] is EngineState.RESTARTING:
            return
        self._spend(death)
        self.deaths[rank] += 1
        self.states[rank], self._died_at[rank] = EngineState.RESTARTING, time.perf_counter()
        task = asyncio.get_running_loop().create_task(self._bring_back(rank, self._restart))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def weights_arrived(self, ranks: Sequence[int], version: int | None) -> None:
        """Let these engines be asked: they have the weights of `version`, or those that they loaded themselves."""
        for rank in set(ranks) & set(self.needing_weights()):
            self.states[rank] = EngineState.SERVING
            self._away_s[rank] += time.perf_counter() - self._died_at[rank]
            self._say(
                f"engine {rank} is back" + ("" if version is None else f", with the weights after {version} steps")
            )
        self._changed.set()

    async def stop(self) -> None:
        """End the restarts that are under way."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spend(self, death: ProcessDied) -> None:
        if self._budget == 0:
            raise death
        if self.n_restarts >= self._budget:
            raise ProcessDied(f"{death}; rollout.restarts={self._budget} were used up before", worker=death.worker)
        self._say(f"{death}; restarting it ({self.n_restarts + 1} of rollout.restarts={self._budget})")

    async def _bring_back(self, rank: int, restart: Callable[[int], Awaitable[None]]) -> None:
        try:
            while True:
                try:
                    await restart(rank)
                    break
                except ProcessDied as again:
                    self._spend(again)
                    self.deaths[rank] += 1
            self.states[rank] = EngineState.NEEDS_WEIGHTS
        except Exception as error:  # told to whoever waits for the engines
            self._failure = error
        self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
