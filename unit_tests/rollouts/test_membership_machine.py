"""Elastic engines as a state machine: machines come, leave and die, engines die, and groups and weights go on."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rollouts.scheduling.availability import EngineState
from rollouts.scheduling.buffer import Schedule
from tools.benchmarks.simulated_run import SimulatedRun, Times, VirtualTimeLoop
from unit_tests.helpers.simulated_machines import LONGEST, Machines, elastic

LONG = 10 * LONGEST
"""Seconds after which all groups have ended, and all that starts has started."""


class MembershipMachine(RuleBasedStateMachine):
    """What is expected is kept by machine: those that have gone, and those whose engine was told to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.said: list[str] = []
        self.version = self.n_killed = 0
        self.leaving: set[int] = set()
        self.gone: set[int] = set()
        self.asked: list[asyncio.Task[Any]] = []

    def do(self, work: Any) -> Any:
        return self.runner.run(work)

    @initialize(least=st.integers(1, 2), more=st.integers(1, 3), group=st.sampled_from([0.1, 1.0, LONGEST]))
    def begin(self, least: int, more: int, group: float) -> None:
        times = Times(group=group, group_std=group / 2, train=1.0, sync=1.5)
        self.most = least + more

        async def start() -> None:
            self.machines = Machines(times, least=least, most=self.most)
            self.run = SimulatedRun(Schedule(steps=1, per_step=1), self.machines, times, timeout_s=10_000.0)
            self.engines = self.run.generation.engines = elastic(self.machines, least=least, said=self.said)
            self.engines.open_slots()
            await self.run.sync_weights(0)

        self.do(start())
        self.next_machine = self.most

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    @rule()
    def come(self) -> None:
        self.machines.add_machine(self.next_machine)
        self.next_machine += 1

    @precondition(lambda self: self.machines.versions)
    @rule(which=st.integers(0, 9))
    def drain(self, which: int) -> None:
        """The cluster tells that a machine is to go. Only engines that have had weights: others may be starting."""
        rank = sorted(self.machines.versions)[which % len(self.machines.versions)]

        async def leave() -> None:
            self.engines.drain(rank, "its machine is to go")

        if self.engines.states[rank] in (EngineState.SERVING, EngineState.NEEDS_WEIGHTS):
            self.leaving.add(self.machines.machines[rank])
        self.do(leave())

    @precondition(lambda self: self.machines.versions)
    @rule(which=st.integers(0, 9), machine_lives=st.booleans())
    def kill(self, which: int, machine_lives: bool) -> None:
        rank = sorted(self.machines.versions)[which % len(self.machines.versions)]
        machine = self.machines.machines[rank]
        self.leaving.discard(machine)
        self.n_killed += 1
        if not machine_lives:
            self.gone.add(machine)

        async def die() -> None:
            self.machines.kill(rank, machine_lives=machine_lives)

        self.do(die())

    @rule(n=st.integers(1, 6))
    def ask(self, n: int) -> None:
        for _ in range(n):
            ticket = len(self.asked)
            work = self.run.generation.generate_group(ticket, self.run.generation.draw_prompt(ticket), 1)
            self.asked.append(self.runner.get_loop().create_task(work))
        self.do(asyncio.sleep(0))

    def can_serve(self) -> bool:
        """An engine is there that does not leave, or may start; otherwise a sync rightly waits."""
        return bool({*self.machines.machines.values()} - self.leaving or self.machines.free)

    @precondition(can_serve)
    @rule(during=st.sampled_from(["nothing", "nothing", "drain", "kill", "crash"]), which=st.integers(0, 9))
    def sync(self, during: str = "nothing", which: int = 0) -> None:
        """Weights reach every engine that is there and does not leave; who stays behind gets no groups."""
        self.version += 1
        syncing = self.runner.get_loop().create_task(self.run.sync_weights(self.version))
        self.do(asyncio.sleep(0.5))
        if during != "nothing" and self.machines.versions:
            if during == "drain":
                self.drain(which)
            else:
                self.kill(which, machine_lives=during == "crash")
            if not self.can_serve():
                self.come()
        self.do(asyncio.wait_for(syncing, LONG))
        serving = self.engines.serving()
        assert (serving or during == "drain") and all(
            self.machines.versions.get(rank) == self.version for rank in serving
        ), self.said

    @rule()
    def settle(self) -> None:
        """After a while and two syncs every machine that did not go has its engine, or there is no slot for it."""
        if not self.can_serve():
            self.come()
        for _ in range(2):
            self.do(asyncio.sleep(LONG))
            self.sync()
        self.do(asyncio.sleep(LONG))
        working = {*self.machines.machines.values()}
        assert not working & self.gone and not working & self.leaving, self.said
        assert len(working) == len(self.machines.machines) == self.most or not self.machines.free, self.said
        assert [*self.engines.serving()] == sorted(self.machines.machines) == self.engines.running(), self.said
        assert all(task.done() for task in self.asked), "a group is lost"
        for ticket, task in enumerate(self.asked):
            [sample] = task.result()
            assert sample.prompt.id == str(ticket) and 0 <= sample.versions[-1] <= self.version
        assert self.engines.n_restarts <= self.n_killed, "to leave is no death, and one death counts once"
        assert self.engines.groups == [0] * self.most, "the counts by which the least busy engine is found"

    def teardown(self) -> None:
        try:
            if hasattr(self, "engines"):
                self.settle()
                self.do(self.engines.stop())
        finally:
            self.runner.close()


TestMembership = MembershipMachine.TestCase
TestMembership.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
