"""Environment with a single reply."""

from __future__ import annotations

from core.types.messages import Message
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.base import Env


class SingleTurn(Env):
    """Environment that ends the episode after the first reply."""

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        return None
