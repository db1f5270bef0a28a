"""Exact match of reply and answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Compare the words of reply and answer, ignoring white space. Raises ValueError without a ground truth."""
    if not prompt.answer.split():
        raise ValueError(f"{prompt.id} has no answer")
    return {"correct": float(messages[-1]["content"].split() == prompt.answer.split())}
