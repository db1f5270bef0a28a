"""Did the policy call the right tool with the right arguments, and give its result as the answer?

The row's column `call` holds the call that is wanted: {"name": ..., "arguments": {...}}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Return `correct` (the call and the answer are right) and `called` (the call is). Raises ValueError without both.

    Another call before the right one does not count against it.
    """
    wanted = prompt.extra.get("call")
    if not wanted or not prompt.answer.split():
        raise ValueError(f"{prompt.id} has no call or no answer")
    made = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    called = any(c["name"] == wanted["name"] and c["arguments"] == wanted["arguments"] for c in made)
    last = messages[-1]
    answered = "tool_calls" not in last and last["content"].split() == prompt.answer.split()
    return {"correct": float(called and answered), "called": float(called)}
