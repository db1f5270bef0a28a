"""What a chat template is given of a message: its fields, under the names that the template reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from core.types.messages import Message

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read what an assistant thought; the first that a template holds is taken."""


def find_reasoning_name(template: str) -> str | None:
    """Return the name under which a template reads the reasoning of a message; None where it reads none.

    >>> find_reasoning_name("{{ message.reasoning_content }}"), find_reasoning_name("{% if enable_thinking %}")
    ('reasoning_content', None)
    """
    return next((name for name in REASONING_NAMES if re.search(rf"\b{name}\b", template)), None)


def to_template_messages(
    messages: Sequence[Message], template: str, in_parts: Collection[str] = ()
) -> Sequence[Mapping[str, Any]]:
    """Return messages as the template reads them.

    in_parts: roles whose text is given as a list of parts; a turn with images always is.
    """
    if not any("reasoning" in m or "parts" in m or m["role"] in in_parts for m in messages):
        return messages
    name = find_reasoning_name(template)
    given: list[dict[str, Any]] = []
    for message in messages:
        fields: dict[str, Any] = {**message}
        if (reasoning := fields.pop("reasoning", None)) is not None and name is not None:
            fields[name] = reasoning
        if fields.pop("parts", None) or message["role"] in in_parts:
            fields["content"] = list_parts(message)
        given.append(fields)
    return given


def list_parts(message: Message) -> list[dict[str, Any]]:
    """Return the content of a message as parts, of which images have no data."""
    parts = message.get("parts") or [{"type": "text", "text": message["content"]}]
    return [{"type": "image"} if part["type"] == "image" else {**part} for part in parts]


def count_characters(messages: Sequence[Message], tools: Sequence[Any] = ()) -> int:
    """Return about how many characters a template has to write."""
    said = sum(len(m["content"]) + len(m.get("reasoning", "")) for m in messages)
    calls = sum(len(str(m["tool_calls"])) for m in messages if "tool_calls" in m)
    return said + calls + sum(len(str(tool)) for tool in tools)
