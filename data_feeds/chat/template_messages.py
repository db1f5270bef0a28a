"""Message fields under the names that the chat template reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from core.types.messages import Message

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read the reasoning of an assistant turn, in order of preference."""


def find_reasoning_name(template: str) -> str | None:
    """Return the template's name for the reasoning of a message, or None.

    >>> find_reasoning_name("{{ message.reasoning_content }}"), find_reasoning_name("{% if enable_thinking %}")
    ('reasoning_content', None)
    """
    # whole words only, since enable_thinking contains thinking
    return next((name for name in REASONING_NAMES if re.search(rf"\b{name}\b", template)), None)


def to_template_messages(
    messages: Sequence[Message], template: str, in_parts: Collection[str] = ()
) -> Sequence[Mapping[str, Any]]:
    """Convert messages to the fields that the template reads.

    in_parts: roles with content as a list of parts. Turns with images always have parts.
    """
    # the usual case, plain text, is not copied
    if not any("reasoning" in m or "train" in m or "parts" in m or m["role"] in in_parts for m in messages):
        return messages
    name = find_reasoning_name(template)
    given: list[dict[str, Any]] = []
    for message in messages:
        fields: dict[str, Any] = {**message}
        fields.pop("train", None)
        if (reasoning := fields.pop("reasoning", None)) is not None and name is not None:
            fields[name] = reasoning
        if fields.pop("parts", None) or message["role"] in in_parts:
            fields["content"] = list_parts(message)
        given.append(fields)
    return given


def list_parts(message: Message) -> list[dict[str, Any]]:
    """Return the content of a message as parts. Image parts have no data."""
    parts = message.get("parts") or [{"type": "text", "text": message["content"]}]
    # the template needs the position of an image, not the data
    return [{"type": "image"} if part["type"] == "image" else {**part} for part in parts]


def count_characters(messages: Sequence[Message], tools: Sequence[Any] = ()) -> int:
    """Return the approximate number of characters in a rendered conversation."""
    said = sum(len(m["content"]) + len(m.get("reasoning", "")) for m in messages)
    calls = sum(len(str(m["tool_calls"])) for m in messages if "tool_calls" in m)
    return said + calls + sum(len(str(tool)) for tool in tools)
