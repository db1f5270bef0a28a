"""Check the replies of a conversation, and compare them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from core.types.messages import Message
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.values import parse_list

LARGEST = sys.float_info.max


def check_ends_in_reply(messages: list[Message], column: str) -> list[Message]:
    """Return the messages. Raises InvalidRow unless the last is an assistant turn, and none of these is empty."""
    if messages[-1]["role"] != "assistant":
        raise InvalidRow("no_reply", f"{column} must end in an assistant turn, found a turn of {messages[-1]['role']}")
    return check_replies(messages)


def check_replies(messages: list[Message]) -> list[Message]:
    """Return the messages. Raises InvalidRow for an empty assistant turn."""
    if any(m["role"] == "assistant" and not m["content"].strip() and "tool_calls" not in m for m in messages):
        raise InvalidRow("empty", "an assistant turn is empty")
    return messages


def normalize_message(message: Message) -> Message:
    """Normalize a message for comparison: strip the content, and blank the call ids."""
    stripped: Message = {**message, "content": message["content"].strip()}
    if "tool_calls" in message:
        stripped["tool_calls"] = [{**call, "id": ""} for call in message["tool_calls"]]
    return stripped


def read_scored(asked: Sequence[Message], columns: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the completions of a prompt, each with a reward. Raises InvalidRow for fewer than two."""
    if asked[-1]["role"] == "assistant":
        raise InvalidRow("ends_in_reply", "messages end with an assistant turn, and completions are replies to them")
    given = [columns.get(name) for name in ("completions", "rewards")]
    texts, rewards = (parse_list(one) if isinstance(one, str) else one for one in given)
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise InvalidRow("no_reply", f"completions must be a list of texts, none empty, found {texts!r:.60}")
    listed = rewards if isinstance(rewards, list) else []
    # also refuses nan; a number beyond float's would overflow
    numbers = [x for x in listed if isinstance(x, int | float) and abs(x) <= LARGEST]
    if not isinstance(rewards, list) or len(numbers) != len(rewards) or len(rewards) != len(texts):
        raise InvalidRow("bad_label", f"rewards must be a number for each of {len(texts)} completions: {rewards!r:.60}")
    if len(texts) < 2:
        raise InvalidRow("no_reply", "it has one completion, and a reward alone says nothing: give several of a prompt")
    return list(zip(texts, map(float, numbers), strict=True))
