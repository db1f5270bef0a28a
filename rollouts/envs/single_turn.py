"""The policy speaks once."""

from __future__ import annotations

from core.types import Message
from rollouts.envs.base import Env


class SingleTurn(Env):
    """Ends the episode after the first reply."""

    async def step(self, reply: str) -> Message | None:
        return None
