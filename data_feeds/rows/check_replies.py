"""Check the replies of a conversation, and compare them."""

from __future__ import annotations

from core.types.messages import Message
from data_feeds.rows.invalid_rows import InvalidRow


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
