"""Reward of a tool call: right tool, right arguments, and the result as the answer.

The row's column `call` contains the expected call: {"name": ..., "arguments": {...}}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    called = any(c["name"] == wanted["name"] and is_same(c["arguments"], wanted["arguments"]) for c in made)
    last = messages[-1]
    # a last turn with a call means that the episode ran out of turns or tokens before an answer
    answered = "tool_calls" not in last and last["content"].split() == prompt.answer.split()
    return {"correct": float(called and answered), "called": float(called)}


def is_same(found: Any, wanted: Any) -> bool:
    """Compare values of JSON, where true is not 1 as in Python.

    >>> is_same({"a": True}, {"a": 1}), is_same([1.0], [1]), is_same([1], [1, 2])
    (False, True, False)
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(is_same(found[name], wanted[name]) for name in wanted)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(is_same, found, wanted))
    return isinstance(found, bool) == isinstance(wanted, bool) and found == wanted
