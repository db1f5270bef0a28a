"""Calls of an actor that start in the same turn of the event loop: they are sent in one message, and begin together.

So the first batch of an engine holds the requests of a whole step. If each call came in a message of its own, the
engine would compute many small batches while the others arrive.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from core.tasks import start_task

Call = tuple[int, tuple[Any, ...], dict[str, Any]]
"""Number, and the arguments of `Actor.call`."""
_NUMBERS = count()


@dataclass(slots=True, eq=False)
class _Turn:
    """Calls of one actor in this turn."""

    actor: Any
    """Ray's handle."""
    calls: list[Call] = field(default_factory=list[Call])
    sent: asyncio.Task[bool] | None = None
    """Whether the calls have begun on the actor; not if it is a single call."""


class JointCalls:
    """Calls of several actors, joined by actor and turn."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}
        """Turns whose calls are not sent, by the identity of the handle."""

    async def call(self, actor: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the answer of a method of the actor. Only `Actor.call` is joined. Raises Ray's errors."""
        if method != "call" or not await self._begin(actor, number := next(_NUMBERS), args, kwargs):
            return await getattr(actor, method).remote(*args, **kwargs)
        return await actor.end_call.remote(number)

    async def _begin(self, actor: Any, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Send a call with the others of this turn. Return False for a single call, which is not sent."""
        turn = self._turns.get(id(actor))
        if turn is None:
            turn = self._turns[id(actor)] = _Turn(actor)
            turn.sent = start_task(self._send(turn))
        assert turn.sent is not None
        turn.calls.append((number, args, kwargs))
        try:
            return await asyncio.shield(turn.sent)  # the others go on where this one is given up
        except asyncio.CancelledError:
            if self._turns.get(id(actor)) is turn:  # nothing is sent yet
                turn.calls = [call for call in turn.calls if call[0] != number]
            elif len(turn.calls) > 1:
                actor.end_call.remote(number)  # or the actor would keep the answer
            raise

    async def _send(self, turn: _Turn) -> bool:
        await asyncio.sleep(0)  # until every call of this turn is here
        del self._turns[id(turn.actor)]
        if len(turn.calls) < 2:
            return False
        await turn.actor.begin_calls.remote(turn.calls)
        return True
