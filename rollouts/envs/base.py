"""Interface of an environment: the other party in an episode. One file per environment, found by its name or its path.

An environment of your own is a file with one subclass of `Env`, named by its path in `rollout.env`. A new one is made
for each episode, as `YourEnv(prompt)`; there is no reset. rollouts/tools/env.py has a base class for one whose tools
are Python functions, rollouts/tools/mcp.py one whose tools come from a server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from core.types.messages import Message, ToolSpec
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply


class Env(ABC):
    """Environment of one episode: it responds to the policy's replies until the episode ends."""

    tools: Sequence[ToolSpec] = ()
    """Tools that the policy may call besides those of the prompt, in OpenAI's form. What the class has is counted when
    the data is read (data.max_prompt_tokens)."""
    player: int = 0
    """Number of the player whose reply comes next. Only a game in which the policy plays several sides changes it."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt

    @classmethod
    def check(cls) -> None:
        """Raise UserError where this environment cannot work on this machine; called once before a run."""
        return

    async def open(self) -> list[Message]:
        """Get ready, and return the messages that follow the prompt before the first reply."""
        return []

    @abstractmethod
    async def step(self, reply: ParsedReply) -> list[Message] | None:
        """Return the messages after the policy's reply (results of tools, a user's turn), or None to end the episode.

        They go to `player`, as it is when `step` returns.
        """

    def scores(self) -> dict[str, float]:
        """Return named numbers that only the environment knows; they are added to the parts of the reward."""
        return {}

    def scores_of(self, player: int) -> dict[str, float]:
        """Return the scores of one player of a game of several."""
        return self.scores()

    def turn_scores(self, player: int) -> list[dict[str, float]]:
        """Return which part of the scores each reply of a player earned, one dict per reply; or nothing.

        What they leave of the reward came with the last reply. Algorithms that give credit turn by turn read it.
        """
        return []

    def counts(self) -> dict[str, float]:
        """Return named numbers for the log, which no reward sees: `tool_calls` is logged as rollout/tool_calls_mean."""
        return {}

    async def close(self) -> None:
        """Let go of what the episode held; called once, however it ends."""
        return
