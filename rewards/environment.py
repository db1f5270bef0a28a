"""Placeholder reward for environments whose scores are the reward (`reward.weights: {return: 1.0}`).

It returns the number of the policy's replies, since a reward has at least one part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Count the replies."""
    return {"replies": float(sum(message["role"] == "assistant" for message in messages))}
