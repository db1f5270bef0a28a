"""Interface of an environment: it responds to the policy in an episode. One file per environment.

`rollout.env` names an environment, or the path of a file with one subclass of `Env`. Each episode creates an instance,
as `YourEnv(prompt)`; there is no reset. rollouts/tools/env.py has a base class for tools written as Python functions.
rollouts/tools/mcp_server.py has a base class for tools of an MCP server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from core.types.messages import Message, ToolSpec
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply


class Env(ABC):
    """Environment of one episode. It responds to replies until the episode ends."""

    tools: Sequence[ToolSpec] = ()
    """Tools besides those of the prompt, in OpenAI's format. Class-level tools count towards data.max_prompt_tokens."""
    least_turns: int = 1
    """Minimum of rollout.max_turns: 2 or more if the policy must see a turn after the first reply."""
    player: int = 0
    """Player of the next reply. Only games with several sides change it."""
    sides: int = 1
    """Number of sides. A game declares 2 or more in its class, and may set another number in `open`. With
    rollout.opponent the policy plays one of them."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt

    @classmethod
    def check(cls) -> None:
        """Raise UserError if the environment cannot work on this machine. Called once before a run."""
        return

    async def open(self) -> list[Message]:
        """Prepare the episode. Return messages between the prompt and the first reply."""
        return []

    @abstractmethod
    async def step(self, reply: ParsedReply) -> list[Message] | None:
        """Return the messages after a reply (tool results or a user turn), or None to end the episode.

        They are addressed to `player`, as set when `step` returns.
        """

    async def end(self) -> None:
        """Compute the scores, if that takes time. Called once, when the conversation has ended."""
        return

    def scores(self) -> dict[str, float]:
        """Return named numbers for the reward. They are added to the reward's parts."""
        return {}

    def scores_of(self, player: int) -> dict[str, float]:
        """Return the scores of one player in a game of several."""
        return self.scores()

    def result_of(self, player: int) -> Literal["won", "drawn", "lost"] | None:
        """Return the result of a game for a player, for the log; None without a result, as of a game cut off."""
        return None

    def turn_scores(self, player: int) -> list[dict[str, float]]:
        """Return the scores earned by each reply of a player, one dict per reply, or [].

        The remainder of the reward is credited to the last reply. Algorithms with per-turn credit read this.
        """
        return []

    def counts(self) -> dict[str, float]:
        """Return named numbers for the log, hidden from the reward. `tool_calls` becomes rollout/tool_calls_mean."""
        return {}

    async def close(self) -> None:
        """Release resources. Called once, however the episode ends."""
        return
