"""Engines that die and come back: which of them may be asked, and which wait for weights.

An engine serves, until its process dies. Then its unfinished groups are asked again, of the others; it is restarted in
the background, waits for the current weights, which the training loop sends while the trainers are idle, and serves
again. `rollout.restarts` bounds how often, over all engines of a run. Engines that come and go:
rollouts/scheduling/elastic_engines.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from core.errors import ProcessDied

ENGINE_GROUP = "engine"
"""Name of the engines' group of workers."""


Process = tuple[int, int]
"""Rank of an engine, and the processes that it has had before."""


class EngineState(Enum):
    """State of one engine."""

    SERVING = auto()
    RESTARTING = auto()
    """Without a process that could be called: it is being started, or waits for a place."""
    NEEDS_WEIGHTS = auto()
    """Started, and without the current weights."""
    LEAVING = auto()
    """Works on the groups that it has, and gets neither others nor weights."""


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
        self.deaths = (0,) * n
        """Processes that each engine has had before. Who asks an engine keeps this, to tell later which one it was."""
        self.groups = [0] * n
        """Groups that the process of each engine works on. One that timed out stays counted: that engine gets fewer."""
        self._serving: list[int] = []
        self._away_s = [0.0] * n
        self._restart, self._budget, self._say = restart, budget, say
        self._left_at = [time.perf_counter()] * n
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._in_sync = False
        self._changed = asyncio.Event()
        self._note_states()

    @property
    def can_restart(self) -> bool:
        return self._restart is not None and self._budget > 0

    @property
    def _replaces_dead(self) -> bool:
        return self._restart is not None

    @property
    def n_restarts(self) -> int:
        return sum(self.deaths)

    def serving(self) -> Sequence[int]:
        """Return the ranks that may be asked for groups."""
        return self._serving

    def running(self) -> list[int]:
        """Return the ranks whose worker can be called."""
        return [rank for rank, state in enumerate(self.states) if state is not EngineState.RESTARTING]

    def taking_weights(self) -> list[int]:
        """Return the ranks that a weight sync goes to."""
        takes = (EngineState.SERVING, EngineState.NEEDS_WEIGHTS)
        return [rank for rank, state in enumerate(self.states) if state in takes]

    def needing_weights(self) -> list[int]:
        """Return the ranks that were started and wait for weights."""
        return [rank for rank, state in enumerate(self.states) if state is EngineState.NEEDS_WEIGHTS]

    def ever_running(self) -> list[int]:
        """Return the ranks that have had a process, whether or not they have one now."""
        return [*range(len(self.states))]

    def away_s(self, rank: int) -> float:
        """Return the seconds that an engine was away: from its deaths until it had weights again."""
        is_away = self.states[rank] in (EngineState.RESTARTING, EngineState.NEEDS_WEIGHTS)
        return self._away_s[rank] + (time.perf_counter() - self._left_at[rank] if is_away else 0.0)

    async def wait_for(self, ranks: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return `ranks()` as soon as it is not empty. Raises the error that ended a restart."""
        while not (found := ranks()):
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()
        self._raise_failure()
        return found

    def process_of(self, rank: int) -> Process:
        return rank, self.deaths[rank]

    def begin_group(self, rank: int) -> Process:
        """Count a group that an engine is asked for; return its process."""
        self.groups[rank] += 1
        return self.process_of(rank)

    def end_group(self, process: Process) -> None:
        """Count a group that has come."""
        rank, _ = process
        if process == self.process_of(rank):
            self.groups[rank] -= 1

    def find_least_busy(self, besides: int | None = None) -> int:
        """Return the serving rank with the fewest groups, the lowest of several; `besides` only if it is the only one.

        At least one engine must serve.
        """
        # 17 microseconds for 1,000 engines: a heap saves 15 of the 70 that the driver spends on a group
        ranks = self._serving if besides is None else [r for r in self._serving if r != besides] or self._serving
        return min(ranks, key=self.groups.__getitem__)

    def report_death(self, death: ProcessDied, deaths: Sequence[int]) -> None:
        """Restart the engine that died. Raises `death` where it was no engine, or none may be restarted any more.

        deaths: `self.deaths` when it was asked; if its rank has died since, this is known already.
        """
        self._raise_failure()
        if not self._replaces_dead or death.worker is None or death.worker[0] != ENGINE_GROUP:
            raise death
        rank = death.worker[1]
        if self.deaths[rank] != deaths[rank] or self.states[rank] is EngineState.RESTARTING:
            return
        self._note_death(rank, death)
        self._lose(rank)
        self._start_task(self._bring_back(rank))

    @contextmanager
    def syncing(self) -> Generator[None]:
        """Let no engine leave while the body brings weights to the engines."""
        self._in_sync = True
        try:
            yield
        finally:
            self._in_sync = False
            self._changed.set()

    def weights_arrived(self, ranks: Sequence[int], version: int | None, deaths: Sequence[int] | None = None) -> None:
        """Let these engines be asked: they have the weights of `version`, or those that they loaded themselves.

        deaths: `self.deaths` when the weights were sent; a process that came later does not have them.
        """
        sent_to = self.deaths if deaths is None else deaths
        for rank in [rank for rank in ranks if self.deaths[rank] == sent_to[rank]]:
            if self.states[rank] is not EngineState.NEEDS_WEIGHTS:
                continue
            self._away_s[rank] += time.perf_counter() - self._left_at[rank]
            self._say_back(rank, "" if version is None else f", with the weights after {version} steps")
            self._set_state(rank, EngineState.SERVING)
        self._changed.set()

    async def stop(self) -> None:
        """End the restarts that are under way."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_death(self, rank: int, death: ProcessDied) -> None:
        """Count a restart. Raises `death` where none is allowed any more."""
        if self._budget == 0:
            raise death
        if self.n_restarts >= self._budget:
            raise ProcessDied(f"{death}; rollout.restarts={self._budget} were used up before", worker=death.worker)
        self._say(f"{death}; restarting it ({self.n_restarts + 1} of rollout.restarts={self._budget})")

    def _say_back(self, rank: int, weights: str) -> None:
        self._say(f"engine {rank} is back{weights}")

    async def _bring_back(self, rank: int) -> None:
        assert self._restart is not None
        try:
            while True:
                try:
                    await self._restart(rank)
                    break
                except ProcessDied as again:
                    self._note_death(rank, again)
                    self._count_process(rank)
            self._set_state(rank, EngineState.NEEDS_WEIGHTS)
        except Exception as error:  # told to whoever waits for the engines
            self._failure = error
        self._changed.set()

    def _lose(self, rank: int) -> None:
        """Note that the engine's process is gone."""
        self._count_process(rank)
        self._left_at[rank] = time.perf_counter()
        self._set_state(rank, EngineState.RESTARTING)
        self._changed.set()

    def _count_process(self, rank: int) -> None:
        """Note that the engine's next process is another one."""
        self.deaths = (*self.deaths[:rank], self.deaths[rank] + 1, *self.deaths[rank + 1 :])
        self.groups[rank] = 0

    def _set_state(self, rank: int, state: EngineState) -> None:
        self.states[rank] = state
        self._note_states()

    def _note_states(self) -> None:
        """Keep what is asked for every group, and changes seldom."""
        self._serving = [rank for rank, state in enumerate(self.states) if state is EngineState.SERVING]

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
