"""Calls that are given up: joined calls and the actor's own methods, without Ray between them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from core.cluster.actor import Actor
from core.cluster.joint_calls import JointCalls
from core.tasks import start_task


class Here:
    """Handle of an actor in this process. As with Ray, calls begin in their order, and go on if nobody waits."""

    def __init__(self, worker: Any) -> None:
        self.actor = Actor.__new__(Actor)  # whose __init__ asks Ray for this machine's address
        self.actor.worker, self.actor.busy, self.actor.begun = worker, {}, {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.shield(start_task(method(*args, **kwargs))))


class Doubling:
    async def double(self, n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n


@pytest.mark.parametrize("turns", range(9))
def test_the_answer_of_a_call_that_is_given_up_is_kept_nowhere(turns: int):
    """Given up before the calls are sent, while they begin, or after it: in any turn of the event loop."""

    async def body() -> None:
        here, joint = Here(Doubling()), JointCalls()
        calls = [asyncio.create_task(joint.call(here, "call", "double", n)) for n in range(4)]
        for _ in range(turns):
            await asyncio.sleep(0)
        calls[1].cancel()
        first, given_up, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert [first, *others] == [0, 4, 6] and (given_up == 2 or isinstance(given_up, asyncio.CancelledError))
        for _ in range(4):  # the actor has answered all by then
            await asyncio.sleep(0)
        assert here.actor.begun == {} and here.actor.busy == {}

    asyncio.run(body())
