"""Replay buffer: groups between engines and trainer, with bounded staleness.

A version is the number of training steps behind the weights. The staleness of a token is the step that trains on it,
minus the version that sampled it. Three rules bound it, independent of timing:

    1. A group may start if the last step that trains on it is at most `max_staleness` above the engines' version.
    2. Groups are trained on in ticket order. The trainer waits for slow groups.
    3. A group that the algorithm rejects is replaced by a new ticket.

No group is discarded for age, since a group that would become too old is never started. In order of completion, slow
groups could wait for ever, and short completions would be trained on more often than long ones.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from core.types.images import read_image
from core.types.sample_json import collect_images, describe_group, restore_group
from core.types.samples import Group, Prompt
from rollouts.scheduling.sampled_rows import SampledRows

# Without a bound, a task in which no group has a signal would sample for ever.
MAX_REJECTED = 20
"""Maximum number of rejected groups per step, as a multiple of the groups it needs. Beyond it, the step fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Stateless schedule: the groups of each step, when groups may start, and when weights are synced.

    A position is the index of a group among accepted groups, in ticket order.

    >>> every_step = Schedule(steps=3, per_step=4)
    >>> every_step.window(1)                         # step 1 trains on positions 4 to 7
    range(4, 8)
    >>> every_step.may_start(4, version=0)           # they wait for the weights after step 0
    False
    >>> Schedule(steps=3, per_step=4, max_staleness=1).may_start(4, version=0)
    True
    """

    steps: int
    per_step: int
    """Groups per training step."""
    max_staleness: int = 0
    sync_every: int = 1
    """Maximum number of steps between weight syncs."""
    max_kl: float | None = None
    """Bound of train/mismatch/kl. A larger value triggers an early weight sync. None: no bound."""
    sample_reuse: int = 1
    """Number of steps that train on each group. Each step draws per_step / sample_reuse new groups, and keeps the
    rest."""

    @property
    def fresh(self) -> int:
        """New groups per step."""
        return self.per_step // self.sample_reuse

    def window(self, step: int) -> range:
        """Return the positions of a step's groups."""
        return range(step * self.fresh, step * self.fresh + self.per_step)

    def may_start(self, position: int, *, version: int) -> bool:
        """Return whether a group started now is fresh enough at the last step that uses it. False after the run's
        end."""
        # position // fresh is the last step that trains on the group: earlier steps reuse it, later ones do not
        is_fresh = position // self.fresh <= version + self.max_staleness
        return is_fresh and position < self.window(self.steps - 1).stop

    def needs_sync(self, steps_done: int, *, version: int, kl: float | None) -> bool:
        """Return whether to sync weights after `steps_done` steps, for engines at `version`.

        kl: train/mismatch/kl of the last step, or None without an update.
        """
        # the last step always syncs, so that the final evaluation sees the final weights
        has_drifted = self.max_kl is not None and kl is not None and kl > self.max_kl
        return has_drifted or steps_done - version >= self.sync_every or steps_done == self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """Group with all rewards."""

    ticket: int
    group: Group
    accepted: bool
    """False if the algorithm rejected the group."""
    seconds: float
    """Time from the group's start to the last reward, in seconds."""


class Waiter(NamedTuple):
    """Task waiting for a condition on the buffer."""

    is_met: Callable[[], bool]
    woken: asyncio.Future[None]


class ReplayBuffer:
    """Queue between engines and trainer. The schedule controls the start of tickets; groups leave in ticket order.

    Not thread-safe: it belongs to one event loop.
    """

    def __init__(self, schedule: Schedule, *, step: int = 0, ticket: int = 0, sampled: SampledRows | None = None):
        """Create an empty buffer. sampled: rows of the tickets as a sampler chooses them; None without a sampler."""
        self.schedule, self.sampled = schedule, sampled
        self.version = step
        """Version of the engines' weights."""
        self.ticket = ticket
        """Next new ticket."""
        self.position = schedule.window(step).start
        """Position of the first group not yet trained on."""
        self.started: set[int] = set()
        """Tickets without a finished group."""
        self.restarts: deque[int] = deque()
        """Tickets among `started` that a stopped run had begun."""
        self.waiting: dict[int, FinishedGroup] = {}
        """Groups that finished before an earlier ticket."""
        self.ready: deque[FinishedGroup] = deque()
        """Groups in ticket order, without gaps."""
        self.next_ready = ticket
        """Lowest unfinished ticket."""
        self.n_reported = 0
        """Groups at the head of `ready` that an earlier step's metrics counted."""
        self._n_accepted = 0
        """Number of accepted groups in `ready`. Updated incrementally, since there may be a hundred thousand."""
        self._n_accepted_waiting = 0
        """Number of accepted groups in `waiting`."""
        self._waiters: list[Waiter] = []

    @property
    def n_collected(self) -> int:
        """Accepted groups in the buffer, for the next step and later steps."""
        return self._n_accepted + self._n_accepted_waiting

    @property
    def lowest_ticket(self) -> int:
        """Lowest ticket of a group that has not left the buffer, or that of the next."""
        return self.ready[0].ticket if self.ready else self.next_ready

    @property
    def _next_position(self) -> int:
        """Position of the next ticket if all started groups are accepted. It may decrease, never increase."""
        # in rounds, a rejected group keeps its position until the round has finished
        waiting = len(self.waiting) if self._in_rounds else self._n_accepted_waiting
        return self.position + self._n_accepted + waiting + len(self.started)

    @property
    def _in_rounds(self) -> bool:
        """True in synchronous training: rejected groups are replaced after a whole round has finished.

        So the batches in an engine, and the last bits of its results, do not depend on timing.
        """
        return self.schedule.max_staleness == 0

    async def reserve_ticket(self) -> int:
        """Wait until another group may start. Return the ticket."""
        if self.restarts:
            # the stopped run started these tickets within the bound on staleness
            return self.restarts.popleft()
        await self._wait_until(self._may_start)
        self.started.add(self.ticket)
        self.ticket += 1
        return self.ticket - 1

    def _may_start(self) -> bool:
        if self.sampled is not None and not self.sampled.is_known(self.ticket):
            return False
        return self.schedule.may_start(self._next_position, version=self.version)

    def add_group(self, finished: FinishedGroup) -> None:
        """Add a finished group. Raises RuntimeError for a ticket that is not running."""
        if finished.ticket not in self.started:
            raise RuntimeError(f"ticket {finished.ticket} was not started, or finished twice")
        self.started.remove(finished.ticket)
        if self.sampled is not None:
            self.sampled.note(finished.ticket, finished.group)
        self._put_waiting(finished)
        self._move_to_ready()
        self._note_change()

    def _put_waiting(self, finished: FinishedGroup) -> None:
        self.waiting[finished.ticket] = finished
        self._n_accepted_waiting += finished.accepted

    def _move_to_ready(self) -> None:
        if self._in_rounds and self.started:
            return
        while self.next_ready in self.waiting:
            finished = self.waiting.pop(self.next_ready)
            self._n_accepted_waiting -= finished.accepted
            self._put_ready(finished)
            self.next_ready += 1

    def _put_ready(self, finished: FinishedGroup) -> None:
        self.ready.append(finished)
        self._n_accepted += finished.accepted

    async def next_step_groups(self, step: int) -> tuple[list[Group], list[FinishedGroup]]:
        """Wait for the groups of a step. Return them, and all groups drawn for it, including rejected ones.

        Example with per_step=2: tickets 0, 1 and 2 finish, and the algorithm rejects 1. Step 0 trains on 0 and 2; drawn
        were 0, 1 and 2. With sample_reuse=2, step 1 trains on 2 and 3; drawn was 3 alone.

        Returns fewer than per_step groups if MAX_REJECTED x per_step were rejected.
        """
        window = self.schedule.window(step)
        assert window.start == self.position, "steps are taken one after the other"
        most_rejected = MAX_REJECTED * len(window)
        await self._wait_until(
            lambda: self._n_accepted >= len(window) or len(self.ready) - self._n_accepted >= most_rejected
        )
        ready = [*self.ready]  # a deque is slow in its middle
        accepted = [i for i, finished in enumerate(ready) if finished.accepted][: len(window)]
        # Groups at the head were drawn for an earlier step and are in its metrics, so they are not drawn again.
        end = accepted[-1] + 1 if len(accepted) == len(window) else len(ready)
        groups = [ready[i].group for i in accepted]
        drawn = ready[self.n_reported : end]
        # The step's first `fresh` accepted groups are used up, with the rejected ones between them. With sample_reuse,
        # the later ones stay for the next step. They are drawn already: n_reported of them.
        n_leaving = accepted[self.schedule.fresh] if len(accepted) > self.schedule.fresh else end
        for _ in range(n_leaving):
            self._n_accepted -= self.ready.popleft().accepted
        self.n_reported = end - n_leaving
        self.position = window.start + self.schedule.fresh
        return groups, drawn

    def set_version(self, version: int) -> None:
        """Set the version of the engines' weights."""
        self.version = version
        self._note_change()

    async def _wait_until(self, is_met: Callable[[], bool]) -> None:
        # the condition is checked again after waking, since another waiter may have run first
        while not is_met():
            # a future per waiter: a condition variable would wake all of them at each of many groups
            waiter = Waiter(is_met, asyncio.get_running_loop().create_future())
            self._waiters.append(waiter)
            try:
                await waiter.woken
            finally:
                self._waiters.remove(waiter)

    def _note_change(self) -> None:
        """Wake waiters whose condition is met. Most finished groups wake nobody."""
        for waiter in self._waiters:
            if not waiter.woken.done() and waiter.is_met():
                waiter.woken.set_result(None)

    def get_state(self) -> dict[str, Any]:
        """Return the finished groups and started tickets, for JSON.

        Of prompts only the messages and tools are included, to which an environment may have added, and their images.
        Tickets draw the rest.
        """
        finished = [*self.ready, *self.waiting.values()]
        images = collect_images(s for g in finished for s in g.group)
        sampled = {} if self.sampled is None else {"sampled": self.sampled.get_state()}
        return sampled | {
            "ticket": self.ticket,
            "started": sorted(self.started),
            "n_reported": self.n_reported,
            "images": {name: base64.b64encode(image.data).decode() for name, image in images.items()},
            "finished": [
                {"ticket": f.ticket, "accepted": f.accepted, "seconds": f.seconds, **describe_group(f.group)}
                for f in finished
            ],
        }

    @staticmethod
    def from_state(
        state: Mapping[str, Any],
        schedule: Schedule,
        draw_prompt: Callable[[int], Prompt],
        *,
        step: int,
        sampled: SampledRows | None = None,
    ) -> ReplayBuffer:
        """Restore the buffer of a stopped run. Finished groups are kept; started groups restart with new weights."""
        buffer = ReplayBuffer(schedule, step=step, ticket=state["ticket"], sampled=sampled)
        if sampled is not None:
            sampled.set_state(state["sampled"])
        # the state lists tickets in order, and the trainer waits for the lowest
        buffer.started, buffer.restarts = set(state["started"]), deque(state["started"])
        images = {name: read_image(base64.b64decode(text)) for name, text in state["images"].items()}
        for one in state["finished"]:
            # a prompt's row depends on the ticket alone, so it is the stopped run's
            group = restore_group(one, draw_prompt(one["ticket"]), images)
            of_group = {name: one[name] for name in ("ticket", "accepted", "seconds")}
            buffer._put_waiting(FinishedGroup(group=group, **of_group))
        # every lower ticket has left the buffer
        buffer.next_ready = min([*buffer.started, *buffer.waiting, buffer.ticket])
        buffer._move_to_ready()
        buffer.n_reported = state["n_reported"]
        return buffer
