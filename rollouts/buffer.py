"""Groups on their way from the engines to the trainer, and the bound on how stale they can be.

A version is the number of training steps that weights have behind them; the lag of a token is the step that trains
on it less the version that sampled it. Three rules bound the lag, whatever the timing:

    1. A group may start when the last step that will train on it is at most `max_lag` above the published version.
    2. Groups are trained on in the order of their tickets; the trainer waits for a slow one.
    3. A group that the algorithm leaves out gives its place to a new ticket.

Nothing is thrown away for being old: what would be too old is never begun. In the order of completion a slow group
could be overtaken for ever, and short answers would be trained on more often than long ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from core.types import Group, Prompt, Sample

MOST_LEFT_OUT = 20
"""Times the groups of a step: so many that the algorithm leaves out, and the step is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which step trains on which groups, when they may start and when weights go out: arithmetic, no state.

    Position: the number of a group among those that are trained on, in ticket order.
    """

    steps: int
    per_step: int
    """Groups that a step trains on."""
    max_lag: int = 0
    publish_every: int = 1
    """Steps between two publishes, at most."""
    publish_drift: float | None = None
    """Publish earlier where the trainer's policy has moved further than this from the one that sampled."""
    reuse: int = 1
    """Steps that train on each group: a step takes per_step / reuse new ones, and keeps the rest of the one before."""

    @property
    def fresh(self) -> int:
        return self.per_step // self.reuse

    def window(self, step: int) -> range:
        """The positions that a step trains on."""
        return range(step * self.fresh, step * self.fresh + self.per_step)

    def may_start(self, position: int, *, version: int) -> bool:
        """Will the group be young enough at its last step, if engines hold `version` now? Past the run's end: no."""
        return position // self.fresh <= version + self.max_lag and position < self.window(self.steps - 1).stop

    def is_due(self, done: int, *, version: int, drift: float | None) -> bool:
        """Publish after `done` steps, where engines hold `version`? drift: as measured in the last one."""
        drifted = self.publish_drift is not None and drift is not None and drift > self.publish_drift
        return drifted or done - version >= self.publish_every or done == self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What became of a ticket."""

    ticket: int
    group: Group
    kept: bool
    """False where the algorithm leaves it out."""
    seconds: float
    """From its start to its last reward."""


class ReplayBuffer:
    """Hands out tickets as fast as the schedule lets it, and groups in ticket order. One event loop, no threads."""

    def __init__(self, schedule: Schedule, *, step: int = 0, ticket: int = 0):
        self.schedule = schedule
        self.version = step
        """What the engines hold."""
        self.ticket = ticket
        """The next new one."""
        self.position = schedule.window(step).start
        """Of the first group that is still to be trained on."""
        self.started: set[int] = set()
        """Tickets of which no group has come yet."""
        self.again: deque[int] = deque()
        """Those of them that a stopped run had started."""
        self.waiting: dict[int, Drawn] = {}
        """What overtook an earlier ticket."""
        self.ready: deque[Drawn] = deque()
        """In ticket order, nothing missing between them."""
        self.settled = ticket
        """Every ticket below has come."""
        self.told = 0
        """So many of `ready` were part of an earlier step's account."""
        self._changed = asyncio.Event()

    @property
    def _kept(self) -> int:
        return sum(drawn.kept for drawn in self.ready)

    @property
    def _next_position(self) -> int:
        """Of the next ticket, if all that are started are kept; it may yet be less, never more."""
        waiting = len(self.waiting) if self._in_rounds else sum(drawn.kept for drawn in self.waiting.values())
        return self.position + self._kept + waiting + len(self.started)

    @property
    def _in_rounds(self) -> bool:
        """Synchronous training replaces what is left out when all of a round have come: which requests meet in an
        engine then depends on no timing, nor do the last bits of what it computes."""
        return self.schedule.max_lag == 0

    async def reserve(self) -> int:
        """Wait until one more group may start; returns its ticket."""
        if self.again:
            return self.again.popleft()
        while not self.schedule.may_start(self._next_position, version=self.version):
            await self._change()
        self.started.add(self.ticket)
        self.ticket += 1
        return self.ticket - 1

    def add(self, drawn: Drawn) -> None:
        """Raises RuntimeError for a ticket that was not started, or came before."""
        if drawn.ticket not in self.started:
            raise RuntimeError(f"ticket {drawn.ticket} was not started, or came twice")
        self.started.remove(drawn.ticket)
        self.waiting[drawn.ticket] = drawn
        self._settle()
        self._changed.set()

    def _settle(self) -> None:
        if self._in_rounds and self.started:
            return
        while self.settled in self.waiting:
            self.ready.append(self.waiting.pop(self.settled))
            self.settled += 1

    async def take(self, step: int) -> tuple[list[Group], list[Drawn]]:
        """Wait for the groups of a step; with them, all that was drawn for it, what was left out included.

        Fewer than per_step come where MOST_LEFT_OUT x per_step were left out.
        """
        window = self.schedule.window(step)
        assert window.start == self.position, "steps are taken one after the other"
        while self._kept < len(window) and len(self.ready) - self._kept < MOST_LEFT_OUT * len(window):
            await self._change()
        kept = [i for i, drawn in enumerate(self.ready) if drawn.kept][: len(window)]
        reach = kept[-1] + 1 if len(kept) == len(window) else len(self.ready)
        groups = [self.ready[i].group for i in kept]
        account = [self.ready[i] for i in range(self.told, reach)]
        leave = kept[self.schedule.fresh] if len(kept) > self.schedule.fresh else reach
        for _ in range(leave):
            self.ready.popleft()
        self.told = reach - leave
        self.position = window.start + self.schedule.fresh
        return groups, account

    def publish(self, version: int) -> None:
        """The engines hold `version` now."""
        self.version = version
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def state(self) -> dict[str, Any]:
        """For JSON: what has come, and which tickets are still out. Prompts are not in it: tickets draw them."""
        came = [*self.ready, *self.waiting.values()]
        return {
            "ticket": self.ticket,
            "started": sorted(self.started),
            "told": self.told,
            "came": [
                {**_all_but("group", drawn), "group": [_all_but("prompt", s) for s in drawn.group]} for drawn in came
            ],
        }

    @staticmethod
    def restored(
        state: dict[str, Any], schedule: Schedule, draw: Callable[[int], Prompt], *, step: int
    ) -> ReplayBuffer:
        """The buffer of a stopped run: what had come is there, what was out starts anew, with the weights of now."""
        buffer = ReplayBuffer(schedule, step=step, ticket=state["ticket"])
        buffer.started, buffer.again = set(state["started"]), deque(state["started"])
        came = [
            Drawn(**{**one, "group": [Sample(prompt=draw(one["ticket"]), **s) for s in one["group"]]})
            for one in state["came"]
        ]
        buffer.waiting = {drawn.ticket: drawn for drawn in came}
        buffer.settled = min([*buffer.started, *buffer.waiting, buffer.ticket])
        buffer._settle()
        buffer.told = state["told"]
        return buffer


def _all_but(left_out: str, record: Drawn | Sample) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record) if f.name != left_out}
