"""The replay buffer as a state machine: groups finish in any order, and the run is killed and resumed at any time."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.types.samples import Prompt
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer, Schedule
from tools.benchmarks.simulated_run import answer

MOST_REJECTED = 15
"""Fewer than those after which a step gives up."""


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Schedules that a recipe may ask for."""
    reuse, every = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2, 3]))
    return Schedule(
        steps=draw(st.integers(1, 6)),
        per_step=reuse * draw(st.integers(1, 3)),
        sync_every=every,
        sample_reuse=reuse,
        max_staleness=every + reuse - 2 + draw(st.sampled_from([0, 0, 1, 2])),
    )


@dataclass
class Plain:
    """The same bookkeeping with nothing forgotten: every ticket of the run, and what became of it."""

    schedule: Schedule
    version: int = 0
    steps_done: int = 0
    n_drawn: int = 0
    """Tickets that the metrics of a step have counted."""
    restarts: list[int] = field(default_factory=list[int])
    running: dict[int, int] = field(default_factory=dict[int, int])
    """Versions with which running tickets began."""
    finished: dict[int, tuple[bool, int]] = field(default_factory=dict[int, tuple[bool, int]])
    """Whether a ticket was accepted, and the version with which it began."""
    n_round: int = 0
    """Tickets whose round has finished: synchronous training replaces rejected groups round by round."""

    @property
    def n_tickets(self) -> int:
        return len(self.finished) + len(self.running) + len(self.restarts)

    @property
    def n_ready(self) -> int:
        """Tickets before the first that has not finished."""
        if self.schedule.max_staleness == 0:
            return self.n_round
        return next((t for t in range(self.n_tickets) if t not in self.finished), self.n_tickets)

    def may_start(self) -> bool:
        if self.restarts:
            return True
        in_round = self.schedule.max_staleness == 0
        places = [accepted or (in_round and t >= self.n_round) for t, (accepted, _) in self.finished.items()]
        position = sum(places) + len(self.running)
        last_step = position // (self.schedule.per_step // self.schedule.sample_reuse)
        return (
            last_step - self.version <= self.schedule.max_staleness
            and position < self.schedule.window(self.schedule.steps - 1).stop
        )

    def list_step(self) -> list[int] | None:
        """Return the tickets of the next step, or None if they are not there."""
        accepted = [t for t in range(self.n_ready) if self.finished[t][0]]
        window = self.schedule.window(self.steps_done)
        return accepted[window.start : window.stop] if len(accepted) >= window.stop else None


class BufferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def teardown(self) -> None:
        self.loop.close()

    @initialize(schedule=schedules())
    def begin(self, schedule: Schedule) -> None:
        self.plain, self.buffer = Plain(schedule), ReplayBuffer(schedule)
        self.save()

    def try_now(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return what a call returns at once, or None if it waits."""

        async def run() -> Any:
            task = asyncio.ensure_future(work)
            for _ in range(3):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait([task])
            return None

        return self.loop.run_until_complete(run())

    @rule(most=st.integers(1, 9))
    def start(self, most: int) -> None:
        for _ in range(most):
            ticket = self.try_now(self.buffer.reserve_ticket())
            assert (ticket is not None) == self.plain.may_start()
            if ticket is None:
                return
            assert ticket == (self.plain.restarts.pop(0) if self.plain.restarts else self.plain.n_tickets)
            self.plain.running[ticket] = self.plain.version

    @precondition(lambda self: self.plain.running)
    @rule(finishing=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3).map(bool)), min_size=1, max_size=9))
    def finish(self, finishing: list[tuple[int, bool]]) -> None:
        for which, accepted in finishing[: len(self.plain.running)]:
            self.finish_one(sorted(self.plain.running)[which % len(self.plain.running)], accepted)

    def finish_one(self, ticket: int, accepted: bool) -> None:
        plain = self.plain
        accepted = accepted or sum(not kept for kept, _ in plain.finished.values()) >= MOST_REJECTED
        version = plain.running.pop(ticket)
        plain.finished[ticket] = accepted, version
        if not plain.running and not plain.restarts:
            plain.n_round = plain.n_tickets
        self.buffer.add_group(
            FinishedGroup(ticket=ticket, group=[answer(ticket, version)], accepted=accepted, seconds=1.0)
        )

    @precondition(lambda self: self.plain.steps_done < self.plain.schedule.steps)
    @rule(early_sync=st.booleans())
    def train(self, early_sync: bool) -> None:
        plain, step = self.plain, self.plain.steps_done
        expected = plain.list_step()
        found = self.try_now(self.buffer.next_step_groups(step))
        assert (found is not None) == (expected is not None)
        if found is None or expected is None:
            return
        groups, drawn = found
        assert [group[0].prompt.id for group in groups] == [str(ticket) for ticket in expected]
        for [sample], ticket in zip(groups, expected, strict=True):
            assert sample.versions[-1] == plain.finished[ticket][1], "the group that was sampled, also after a resume"
            assert step - sample.versions[-1] <= plain.schedule.max_staleness
        assert [one.ticket for one in drawn] == [*range(plain.n_drawn, expected[-1] + 1)], "each is counted once"
        assert [one.accepted for one in drawn] == [plain.finished[one.ticket][0] for one in drawn]
        plain.n_drawn, plain.steps_done = expected[-1] + 1, step + 1
        if early_sync or plain.schedule.needs_sync(step + 1, version=plain.version, kl=None):
            plain.version = step + 1
            self.buffer.set_version(step + 1)

    @precondition(lambda self: self.plain.steps_done < self.plain.schedule.steps)
    @rule(seed=st.integers(0, 2**32))
    def go_on(self, seed: int) -> None:
        """Go on to the end of the step, with all that may run: chance alone would not often come this far."""
        draw, before = random.Random(seed), self.plain.steps_done
        while self.plain.steps_done == before:
            self.start(draw.randint(1, 9))
            for ticket in draw.sample(sorted(self.plain.running), draw.randint(0, len(self.plain.running))):
                self.finish_one(ticket, accepted=draw.random() < 0.7)
            self.train(early_sync=draw.random() < 0.2)

    @rule()
    def save(self) -> None:
        self.saved = json.dumps(self.buffer.get_state()), copy.deepcopy(self.plain)

    @rule()
    def resume(self) -> None:
        """Go on from the last save, as a run does that was killed: what was running then is sampled anew."""
        state, self.plain = self.saved[0], copy.deepcopy(self.saved[1])
        plain = self.plain
        plain.restarts, plain.running = sorted([*plain.running, *plain.restarts]), {}
        plain.version = plain.steps_done  # the engines get the checkpoint's weights
        self.buffer = ReplayBuffer.from_state(
            json.loads(state), plain.schedule, lambda t: Prompt(id=str(t), messages=[]), step=plain.steps_done
        )

    @invariant()
    def never_waits_for_itself(self) -> None:
        """A trainer that waits has groups on the way, or they may start."""
        plain = getattr(self, "plain", None)
        if plain is not None and plain.steps_done < plain.schedule.steps and plain.list_step() is None:
            assert plain.running or plain.may_start()


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
