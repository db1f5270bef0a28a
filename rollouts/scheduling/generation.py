"""Background generation: groups start as soon as their staleness is bounded, while the trainer works."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from configs.judge_schema import JudgeBudgetConfig
from core.cluster.workers import Workers
from core.errors import ProcessDied, RunStopped
from core.tasks import start_task
from core.timing.clock import ActivityTimer
from core.timing.deadlines import GROUP_TIMEOUT_GRACE_S
from core.timing.timeouts import wait_or_cancel
from core.types.samples import Group, Prompt
from rollouts.scheduling.availability import ENGINE_GROUP, EngineAvailability
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer
from rollouts.scheduling.judge_spend import JudgeSpend
from rollouts.scheduling.judge_turns import JudgeTurns
from rollouts.worker import RolloutWorker

T = TypeVar("T")


class GroupRequests:
    """Requests of groups to engines, with retries. `n_retries` counts retries after a timeout."""

    def __init__(
        self,
        workers: Workers[RolloutWorker],
        *,
        timeout_s: float,
        engines: EngineAvailability | None = None,
        judge_budget: JudgeBudgetConfig | None = None,
        turns: JudgeTurns | None = None,
        waits_for_places: bool = False,
    ):
        """timeout_s: deadline of one group, per attempt. engines: None for engines without restart. turns: of a judge
        on the engines' devices. waits_for_places: episodes wait for a place, and only the worker knows how long."""
        self.judges, self.turns = JudgeSpend(judge_budget), turns
        self.engines = engines or EngineAvailability(len(workers))
        self.workers, self.timeout_s, self._waits_for_places = workers, timeout_s, waits_for_places
        # places, and the rewards of other groups in a judge's turn, may take longer than any call
        waits = waits_for_places or turns is not None
        self._groups = workers.with_deadline(math.inf, key="") if waits else workers
        self.n_retries = 0

    async def generate_group(self, ticket: int, prompt: Prompt, size: int) -> Group:
        """Return a group from the least busy engine. If the engine dies, another engine repeats the group.

        Raises ProcessDied for an engine without restart, and RunStopped for a group that times out twice.
        """
        too_slow: list[int] = []
        while True:  # one coroutine for all attempts: a step may have a hundred thousand groups
            # before the call: it tells later which process of the engine has died
            deaths = self.engines.deaths
            try:
                rank = await self._choose_engine(too_slow)
                process = self.engines.begin_group(rank)
                group = await self._request(rank, ticket, prompt, size)
                if group is not None:
                    self.engines.end_group(process)
                    self.judges.count(group)
                    return group
                # end_group is not called: the group stays counted, so that a slow engine gets fewer
                too_slow.append(rank)
                # two engines were too slow: it is the group, not the engine
                if len(too_slow) > 1:
                    await self._stop_for(ticket, too_slow)
                self.n_retries += 1
            except ProcessDied as death:
                # the timeouts may have been the dying engine's, so the group has two attempts again
                self.engines.report_death(death, deaths)
                too_slow = []

    async def _request(self, rank: int, ticket: int, prompt: Prompt, size: int) -> Group | None:
        """Return a group of an engine; None on timeout, also where the worker reports it."""
        ask = self._groups.call_one
        if self.turns is None:
            call = ask(rank, RolloutWorker.generate_group, ticket, prompt, size)
            return await self._wait_for_episodes(rank, call)
        try:
            async with self.turns.playing():
                call = ask(rank, RolloutWorker.play_group, ticket, prompt, size)
                if not await self._wait_for_episodes(rank, call):
                    return None
            # without a deadline of the group: each reward has its own, and waits for those of other groups
            async with self.turns.judging():
                return await self._wait_while_alive(rank, ask(rank, RolloutWorker.reward_group, ticket))
        except BaseException:
            # not awaited: the engine may be dead, or the run may end
            start_task(ask(rank, RolloutWorker.forget_group, ticket))
            raise

    async def _wait_for_episodes(self, rank: int, call: Coroutine[Any, Any, T]) -> T | None:
        """Await the call that samples a group; return None on timeout."""
        if self._waits_for_places:
            return await self._wait_while_alive(rank, call)
        # longer than the worker's own deadline, so that the worker reports first
        return await wait_or_cancel(call, self.timeout_s + GROUP_TIMEOUT_GRACE_S)

    async def _wait_while_alive(self, rank: int, call: Coroutine[Any, Any, T]) -> T | None:
        """Await a call without a deadline; return None if the engine's event loop is blocked.

        Raises ProcessDied if the engine gives no sign of life meanwhile.
        """
        running, timer = start_task(call), self.workers.attribute("timer")
        try:
            while not (await asyncio.wait([running], timeout=self.timeout_s))[0]:
                await self._check_alive(rank)
                # the health check has a thread of its own, and says nothing of an environment that never awaits
                answer = timer.call_one(rank, ActivityTimer.read_seconds)
                if await wait_or_cancel(answer, self.timeout_s) is None:
                    return None
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait([running])  # until an engine in this process has stopped the group

    async def _choose_engine(self, too_slow: list[int]) -> int:
        """Return the least busy engine. After a timeout, prefer another engine."""
        await self.engines.wait_for(self.engines.serving)
        if not too_slow:
            return self.engines.find_least_busy()
        (first,) = too_slow
        second = self.engines.find_least_busy(besides=first)
        if second == first or self.engines.can_restart:  # a stopped one would let more groups wait as long
            await self._check_alive(first)
        return second

    async def _stop_for(self, ticket: int, too_slow: list[int]) -> None:
        """Stop the run for a group that two engines did not finish. Raises ProcessDied if one of them is dead."""
        for rank in too_slow:
            await self._check_alive(rank)
        raise RunStopped(
            f"the group of ticket {ticket} was requested twice, from engine {too_slow[0]} first, and did not finish "
            f"within rollout.timeout_s={self.timeout_s:g} seconds: raise that if completions may take so long"
        )

    async def _check_alive(self, rank: int) -> None:
        alive, seen = await self.workers.check_health(rank)
        if not alive:
            raise ProcessDied(seen, worker=(ENGINE_GROUP, rank))


class Generation(GroupRequests):
    """Background generation of a training run's groups into the replay buffer."""

    def __init__(
        self,
        workers: Workers[RolloutWorker],
        *,
        draw_prompt: Callable[[int], Prompt],
        accept_group: Callable[[Group], bool],
        buffer: ReplayBuffer,
        group_size: int,
        timeout_s: float,
        engines: EngineAvailability | None = None,
        judge_budget: JudgeBudgetConfig | None = None,
        turns: JudgeTurns | None = None,
        waits_for_places: bool = False,
        on_finished: Callable[[FinishedGroup], None] = lambda _: None,
    ):
        """draw_prompt: ticket -> prompt. accept_group: see Algorithm. The others: see GroupRequests.

        on_finished: called when a group has been added to the buffer.
        """
        super().__init__(
            workers,
            timeout_s=timeout_s,
            engines=engines,
            judge_budget=judge_budget,
            turns=turns,
            waits_for_places=waits_for_places,
        )
        self.draw_prompt, self.accept_group, self.buffer = draw_prompt, accept_group, buffer
        self.group_size, self.on_finished = group_size, on_finished
        self.tasks: set[asyncio.Task[Any]] = set()
        self._of_run: asyncio.TaskGroup | None = None
        self._may_start = asyncio.Event()
        self._may_start.set()

    @asynccontextmanager
    async def running_in_background(self) -> AsyncGenerator[None]:
        """Generate while the body runs. An error on either side cancels the other."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._of_run = tasks
                starting = tasks.create_task(self._start_groups(tasks))
                yield
                for task in (starting, *self.tasks):  # a resumed run of fewer steps does not need all of them
                    task.cancel()
        except ExceptionGroup as failed:
            # the first error cancels all other tasks, so it is the cause
            raise failed.exceptions[0] from None

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        """Wait for running groups, and start no new ones while the body runs."""
        self._may_start.clear()
        try:
            while running := [task for task in self.tasks if not task.done()]:
                await asyncio.wait(running)
            yield
        finally:
            self._may_start.set()

    def start_beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` until the body of `running_in_background` ends. An error of `work` ends the body."""
        assert self._of_run is not None, "nothing runs in the background"
        return self._keep(self._of_run.create_task(work))

    async def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            ticket = await self.buffer.reserve_ticket()
            await self._may_start.wait()
            self._keep(tasks.create_task(self._generate_into_buffer(ticket)))

    def _keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        # the event loop keeps only weak references to tasks
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _generate_into_buffer(self, ticket: int) -> None:
        now = asyncio.get_running_loop().time  # not the wall clock in a simulator
        start = now()
        group = await self.generate_group(ticket, self.draw_prompt(ticket), self.group_size)
        accepted = self.accept_group(group)
        finished = FinishedGroup(ticket=ticket, group=group, accepted=accepted, seconds=now() - start)
        self.buffer.add_group(finished)
        self.on_finished(finished)
