"""Environment of a single reply."""

from __future__ import annotations

from core.types import Message
from rollouts.envs.base import Env


class SingleTurn(Env):
    """Environment that ends the episode after the first reply."""

    async def step(self, reply: str) -> Message | None:
        return None
