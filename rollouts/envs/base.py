"""Interface of an environment: the other party in an episode. One file per environment, found by its name or its path.

An environment of your own is a file with one subclass of `Env`, named by its path in `rollout.env`. A new one is made
for each episode, as `YourEnv(prompt)`; there is no reset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from core.types import Message, Prompt


class Env(ABC):
    """Environment of one episode: it responds to the policy's replies until the episode ends."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt

    @abstractmethod
    async def step(self, reply: str) -> Message | None:
        """Return the message after the policy's reply (a tool's result, a user's turn), or None to end the episode."""

    def scores(self) -> dict[str, float]:
        """Return named numbers that only the environment knows; they are added to the parts of the reward."""
        return {}
