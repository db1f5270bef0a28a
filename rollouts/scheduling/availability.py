"""Availability of engines: which serve requests, which restart, and which wait for weights.

When the process of an engine dies, other engines repeat the unfinished groups. The engine restarts in the background.
It waits for a weight sync, which runs while the trainers are idle, then serves again. `rollout.restarts` is the maximum
number of restarts over all engines of a run. For engines that join and leave, see
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
"""Name of the engines' worker group."""


Process = tuple[int, int]
"""Rank of an engine, and the number of its earlier processes."""


class EngineState(Enum):
    """State of one engine."""

    SERVING = auto()
    RESTARTING = auto()
    """No callable process: it is starting, or waits for a free place."""
    NEEDS_WEIGHTS = auto()
    """Started, but without the current weights."""
    LEAVING = auto()
    """Finishes running groups, and receives neither new groups nor weights."""


class EngineAvailability:
    """States of a run's engines. Not thread-safe: it belongs to one event loop."""

    def __init__(
        self,
        n: int,
        *,
        restart: Callable[[int], Awaitable[None]] | None = None,
        budget: int = 0,
        say: Callable[[str], None] = print,
    ):
        """restart: replaces the worker of a rank; None: engines are not restarted. budget: maximum number of
        restarts."""
        self.states = [EngineState.SERVING] * n
        self.deaths = (0,) * n
        """Number of dead processes of each engine. Callers keep this tuple to identify the process they called."""
        self.groups = [0] * n
        """Number of running groups of each process. A timed-out group stays counted, so a slow engine gets fewer."""
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
        """Return the ranks that accept groups."""
        return self._serving

    def running(self) -> list[int]:
        """Return the ranks with a callable worker."""
        return [rank for rank, state in enumerate(self.states) if state is not EngineState.RESTARTING]

    def taking_weights(self) -> list[int]:
        """Return the ranks that receive weight syncs."""
        takes = (EngineState.SERVING, EngineState.NEEDS_WEIGHTS)
        return [rank for rank, state in enumerate(self.states) if state in takes]

    def needing_weights(self) -> list[int]:
        """Return the ranks that started and wait for weights."""
        return [rank for rank, state in enumerate(self.states) if state is EngineState.NEEDS_WEIGHTS]

    def ever_running(self) -> list[int]:
        """Return the ranks that have ever had a process."""
        return [*range(len(self.states))]

    def away_s(self, rank: int) -> float:
        """Return the total downtime of an engine, in seconds: from each death until weights arrive."""
        is_away = self.states[rank] in (EngineState.RESTARTING, EngineState.NEEDS_WEIGHTS)
        return self._away_s[rank] + (time.perf_counter() - self._left_at[rank] if is_away else 0.0)

    async def wait_for(self, ranks: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Wait until `ranks()` is not empty, and return it. Raises the error of a failed restart."""
        while not (found := ranks()):
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()
        # also if engines serve: a failed restart ends the run
        self._raise_failure()
        return found

    def process_of(self, rank: int) -> Process:
        return rank, self.deaths[rank]

    def begin_group(self, rank: int) -> Process:
        """Count a group sent to an engine. Return the engine's process."""
        self.groups[rank] += 1
        return self.process_of(rank)

    def end_group(self, process: Process) -> None:
        """Count a finished group."""
        rank, _ = process
        if process == self.process_of(rank):
            self.groups[rank] -= 1

    def find_least_busy(self, besides: int | None = None) -> int:
        """Return the serving rank with the fewest groups, the lowest on a tie. `besides` only if no other serves.

        At least one engine must serve.
        """
        # 17 microseconds for 1,000 engines: a heap saves 15 of the 70 that the driver spends on a group
        ranks = self._serving if besides is None else [r for r in self._serving if r != besides] or self._serving
        return min(ranks, key=self.groups.__getitem__)

    def report_death(self, death: ProcessDied, deaths: Sequence[int]) -> None:
        """Restart a dead engine. Raises `death` if another worker died, or the restarts are used up.

        deaths: `self.deaths` at the time of the call. A rank with more deaths since has already been handled.
        """
        self._raise_failure()
        if not self._replaces_dead or death.worker is None or death.worker[0] != ENGINE_GROUP:
            raise death
        rank = death.worker[1]
        # many groups report the same death
        if self.deaths[rank] != deaths[rank] or self.states[rank] is EngineState.RESTARTING:
            return
        self._note_death(rank, death)
        self._lose(rank)
        self._start_task(self._bring_back(rank))

    @contextmanager
    def syncing(self) -> Generator[None]:
        """Prevent engines from leaving while the body syncs weights."""
        self._in_sync = True
        try:
            yield
        finally:
            self._in_sync = False
            self._changed.set()

    def weights_arrived(self, ranks: Sequence[int], version: int | None, deaths: Sequence[int] | None = None) -> None:
        """Set engines to serving, with the weights of `version`, or with self-loaded weights.

        deaths: `self.deaths` when the weights were sent. Processes started later do not have them.
        """
        sent_to = self.deaths if deaths is None else deaths
        for rank in [rank for rank in ranks if self.deaths[rank] == sent_to[rank]]:
            # a sync also reaches the engines that serve already
            if self.states[rank] is not EngineState.NEEDS_WEIGHTS:
                continue
            self._away_s[rank] += time.perf_counter() - self._left_at[rank]
            self._say_back(rank, "" if version is None else f", with the weights after {version} steps")
            self._set_state(rank, EngineState.SERVING)
        self._changed.set()

    def run_beside(self, work: Callable[[Callable[[Exception], None]], Coroutine[Any, Any, None]]) -> None:
        """Run a task until `stop`. It is given a function that ends the run with an error."""
        self._start_task(work(self._fail))

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._changed.set()

    async def stop(self) -> None:
        """Cancel running restarts and other tasks."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_death(self, rank: int, death: ProcessDied) -> None:
        """Log a restart. Raises ProcessDied if the budget is used up."""
        self._say(spend_restart(death, used=self.n_restarts, budget=self._budget))

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
                    # it died during its start, which costs a restart too
                    self._note_death(rank, again)
                    self._count_process(rank)
            self._set_state(rank, EngineState.NEEDS_WEIGHTS)
            self._changed.set()
        except Exception as error:  # raised to whoever waits for engines: this task has no caller
            self._fail(error)

    def _lose(self, rank: int) -> None:
        """Record the death of an engine's process."""
        self._count_process(rank)
        self._left_at[rank] = time.perf_counter()
        self._set_state(rank, EngineState.RESTARTING)
        self._changed.set()

    def _count_process(self, rank: int) -> None:
        """Count a new process of the engine."""
        # a new tuple, since callers keep the old one
        self.deaths = (*self.deaths[:rank], self.deaths[rank] + 1, *self.deaths[rank + 1 :])
        self.groups[rank] = 0

    def _set_state(self, rank: int, state: EngineState) -> None:
        self.states[rank] = state
        self._note_states()

    def _note_states(self) -> None:
        """Update cached lists of states."""
        self._serving = [rank for rank, state in enumerate(self.states) if state is EngineState.SERVING]

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        # the event loop keeps only weak references to tasks
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def list_running(engines: int, availability: EngineAvailability | None) -> Sequence[int]:
    """Return the ranks with a callable worker; all of them without a record of their availability."""
    return range(engines) if availability is None else availability.running()


def spend_restart(death: ProcessDied, *, used: int, budget: int) -> str:
    """Return the sentence on one more restart after a death. Raises ProcessDied if `budget` is used up."""
    if budget == 0:
        raise death
    if used >= budget:
        raise ProcessDied(f"{death}; rollout.restarts={budget} were used up before", worker=death.worker)
    return f"{death}; restarting it ({used + 1} of rollout.restarts={budget})"
