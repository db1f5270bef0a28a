"""The replay buffer: groups on their way from the engines to the trainer, with a bound on their staleness.

A version is the number of training steps that weights have behind them. The staleness of a token is the step that
trains on it minus the version that sampled it. Three rules bound it, whatever the timing:

    1. A group may start when the last step that will train on it is at most `max_staleness` above the version that
       the engines hold.
    2. Groups are trained on in the order of their tickets; the trainer waits for a slow one.
    3. A group that the algorithm rejects is replaced by a new ticket.

No group is discarded for its age: one that would get too old is never started. In order of completion, slow groups
could wait for ever, and short completions would be trained on more often than long ones.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from core.types.arrays import from_json, list_fields, to_json
from core.types.images import EncodedImage, read_image
from core.types.messages import describe_messages
from core.types.sample_json import collect_images, describe_places, restore_messages, restore_places
from core.types.samples import Group, Prompt, Sample, make_sample

MAX_REJECTED = 20
"""A step fails when the algorithm has rejected this many times the groups that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Compute which step trains on which groups, when they may start and when weights are synced. No state.

    A position is the number of a group among those that are trained on, in ticket order.

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
    """Groups that a step trains on."""
    max_staleness: int = 0
    sync_every: int = 1
    """Largest number of steps between two weight syncs."""
    max_kl: float | None = None
    """Bound of train/mismatch/kl, above which weights are synced earlier; None is no bound."""
    sample_reuse: int = 1
    """Steps that train on each group: a step takes per_step / sample_reuse new ones, and keeps the rest."""

    @property
    def fresh(self) -> int:
        """New groups per step."""
        return self.per_step // self.sample_reuse

    def window(self, step: int) -> range:
        """Return the positions that a step trains on."""
        return range(step * self.fresh, step * self.fresh + self.per_step)

    def may_start(self, position: int, *, version: int) -> bool:
        """Tell whether a group started now will be fresh enough at its last step; False past the end of the run."""
        is_fresh = position // self.fresh <= version + self.max_staleness
        return is_fresh and position < self.window(self.steps - 1).stop

    def needs_sync(self, steps_done: int, *, version: int, kl: float | None) -> bool:
        """Tell whether to sync weights after `steps_done` steps, where engines hold `version`.

        kl: train/mismatch/kl of the last step; None where it made no update.
        """
        has_drifted = self.max_kl is not None and kl is not None and kl > self.max_kl
        return has_drifted or steps_done - version >= self.sync_every or steps_done == self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """Group whose last reward has arrived."""

    ticket: int
    group: Group
    accepted: bool
    """False: the algorithm rejected the group."""
    seconds: float
    """Seconds from the group's start to its last reward."""


class Waiter(NamedTuple):
    """Task that waits for a condition on the buffer."""

    is_met: Callable[[], bool]
    woken: asyncio.Future[None]


class ReplayBuffer:
    """Queue between engines and trainer: tickets as fast as the schedule allows, groups in ticket order.

    It belongs to one event loop, without threads.
    """

    def __init__(self, schedule: Schedule, *, step: int = 0, ticket: int = 0):
        self.schedule = schedule
        self.version = step
        """Version that the engines hold."""
        self.ticket = ticket
        """Next new ticket."""
        self.position = schedule.window(step).start
        """Position of the first group that is still to be trained on."""
        self.started: set[int] = set()
        """Tickets without a finished group."""
        self.restarts: deque[int] = deque()
        """Tickets among `started` that a stopped run had begun."""
        self.waiting: dict[int, FinishedGroup] = {}
        """Groups that finished before an earlier ticket."""
        self.ready: deque[FinishedGroup] = deque()
        """Groups in ticket order, none missing between them."""
        self.next_ready = ticket
        """Every ticket below has finished."""
        self.n_reported = 0
        """Groups at the head of `ready` that a previous step's metrics already counted."""
        self._n_accepted = 0
        """Accepted groups in `ready`; counted as they come and go, since there may be a hundred thousand."""
        self._n_accepted_waiting = 0
        """Accepted groups in `waiting`."""
        self._waiters: list[Waiter] = []

    @property
    def n_collected(self) -> int:
        """Accepted groups that are here, for the next step and those after it."""
        return self._n_accepted + self._n_accepted_waiting

    @property
    def _next_position(self) -> int:
        """Position of the next ticket if all started ones are accepted; it may become less, never more."""
        waiting = len(self.waiting) if self._in_rounds else self._n_accepted_waiting
        return self.position + self._n_accepted + waiting + len(self.started)

    @property
    def _in_rounds(self) -> bool:
        """True in synchronous training: rejected groups are replaced when all of a round have finished.

        Which requests meet in an engine then depends on no timing, nor do the last bits of what it computes.
        """
        return self.schedule.max_staleness == 0

    async def reserve_ticket(self) -> int:
        """Wait until one more group may start; return its ticket."""
        if self.restarts:
            return self.restarts.popleft()
        await self._wait_until(lambda: self.schedule.may_start(self._next_position, version=self.version))
        self.started.add(self.ticket)
        self.ticket += 1
        return self.ticket - 1

    def add_group(self, finished: FinishedGroup) -> None:
        """Take a finished group; RuntimeError for a ticket that was not started, or finished before."""
        if finished.ticket not in self.started:
            raise RuntimeError(f"ticket {finished.ticket} was not started, or finished twice")
        self.started.remove(finished.ticket)
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
        """Wait for the groups of a step; return them, and all groups drawn for it, rejected ones included.

        Example with per_step=2: tickets 0, 1 and 2 finish, the algorithm rejects 1. Step 0 gets the groups of 0 and
        2; drawn for it were 0, 1 and 2. With sample_reuse=2, step 1 gets those of 2 and 3; drawn for it was 3 alone.

        Fewer than per_step groups come where MAX_REJECTED x per_step were rejected.
        """
        window = self.schedule.window(step)
        assert window.start == self.position, "steps are taken one after the other"
        most_rejected = MAX_REJECTED * len(window)
        await self._wait_until(
            lambda: self._n_accepted >= len(window) or len(self.ready) - self._n_accepted >= most_rejected
        )
        ready = [*self.ready]  # a deque is slow in its middle
        accepted = [i for i, finished in enumerate(ready) if finished.accepted][: len(window)]
        end = accepted[-1] + 1 if len(accepted) == len(window) else len(ready)
        groups = [ready[i].group for i in accepted]
        drawn = ready[self.n_reported : end]
        n_leaving = accepted[self.schedule.fresh] if len(accepted) > self.schedule.fresh else end
        for _ in range(n_leaving):
            self._n_accepted -= self.ready.popleft().accepted
        self.n_reported = end - n_leaving
        self.position = window.start + self.schedule.fresh
        return groups, drawn

    def set_version(self, version: int) -> None:
        """Set the version that the engines hold."""
        self.version = version
        self._note_change()

    async def _wait_until(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            waiter = Waiter(is_met, asyncio.get_running_loop().create_future())
            self._waiters.append(waiter)
            try:
                await waiter.woken
            finally:
                self._waiters.remove(waiter)

    def _note_change(self) -> None:
        """Wake who can go on; most groups that finish are no reason for anybody to."""
        for waiter in self._waiters:
            if not waiter.woken.done() and waiter.is_met():
                waiter.woken.set_result(None)

    def get_state(self) -> dict[str, Any]:
        """Return the finished groups and the started tickets, for JSON. Prompts are not included: tickets draw them.

        Images are: an environment may have shown them.
        """
        finished = [*self.ready, *self.waiting.values()]
        images = collect_images(s for g in finished for s in g.group)
        return {
            "ticket": self.ticket,
            "started": sorted(self.started),
            "n_reported": self.n_reported,
            "images": {name: base64.b64encode(image.data).decode() for name, image in images.items()},
            "finished": [
                {**_fields_but("group", g), "group": [_describe_sample(s) for s in g.group]} for g in finished
            ],
        }

    @staticmethod
    def from_state(
        state: Mapping[str, Any], schedule: Schedule, draw_prompt: Callable[[int], Prompt], *, step: int
    ) -> ReplayBuffer:
        """Return the buffer of a stopped run: finished groups are there, started ones start again with new weights."""
        buffer = ReplayBuffer(schedule, step=step, ticket=state["ticket"])
        buffer.started, buffer.restarts = set(state["started"]), deque(state["started"])
        images = {name: read_image(base64.b64decode(text)) for name, text in state["images"].items()}
        for one in state["finished"]:
            buffer._put_waiting(_group_from_state(one, draw_prompt, images))
        buffer.next_ready = min([*buffer.started, *buffer.waiting, buffer.ticket])
        buffer._move_to_ready()
        buffer.n_reported = state["n_reported"]
        return buffer


def _describe_sample(sample: Sample) -> dict[str, Any]:
    """Return a sample without its prompt, for JSON; images are named by their hash."""
    named = {"transcript": describe_messages(sample.transcript), "images": describe_places(sample.images)}
    return {name: to_json(value) for name, value in (_fields_but("prompt", sample) | named).items()}


def _group_from_state(
    one: Mapping[str, Any], draw_prompt: Callable[[int], Prompt], images: Mapping[str, EncodedImage]
) -> FinishedGroup:
    prompt = draw_prompt(one["ticket"])
    group = [make_sample(prompt=prompt, **_read_sample(s, images)) for s in one["group"]]
    fields_of_group: dict[str, Any] = {**one, "group": group}
    return FinishedGroup(**fields_of_group)


def _read_sample(described: Mapping[str, Any], images: Mapping[str, EncodedImage]) -> dict[str, Any]:
    """Return what `_describe_sample` described, by the names of the fields."""
    found: dict[str, Any] = from_json(described)
    found["transcript"] = restore_messages(found["transcript"], images)
    found["images"] = restore_places(found["images"], images)
    return found


def _fields_but(name: str, record: Any) -> dict[str, Any]:
    return {field: getattr(record, field) for field in list_fields(type(record)) if field != name}
