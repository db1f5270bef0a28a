"""Reward of a tool call: right tool, right arguments, and the result as the answer.

The row's column `call` contains the expected call: {"name": ..., "arguments": {...}}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Return `correct` (call and answer) and `called` (the call). Raises ValueError if the row lacks either.

    Additional calls are not penalized.
    """
    wanted = prompt.extra.get("call")
    if not wanted or not prompt.answer.split():
        raise ValueError(f"{prompt.id} has no call or no answer")
    made = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    called = any(c["name"] == wanted["name"] and c["arguments"] == wanted["arguments"] for c in made)
    last = messages[-1]
    # a last turn with a call means that the episode ran out of turns or tokens before an answer
    answered = "tool_calls" not in last and last["content"].split() == prompt.answer.split()
    return {"correct": float(called and answered), "called": float(called)}
