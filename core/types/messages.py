"""Messages of a conversation, tools included, for rows, environments, agents and rewards.

The format is OpenAI's, with two differences: call arguments are an object instead of JSON text, and `content` is text.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any, Literal, NotRequired, TypedDict

from core.types.images import EncodedImage, describe_image

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Valid roles of a message."""


class FunctionCall(TypedDict):
    """Called function and its arguments."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """Tool call in a reply."""

    id: str
    """Id of the call; the result's message repeats it as `tool_call_id`."""
    type: Literal["function"]
    function: FunctionCall


class TextPart(TypedDict):
    """Text between images."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """Image in a message."""

    type: Literal["image"]
    image: EncodedImage


Part = TextPart | ImagePart


class Message(TypedDict):
    """Message of a conversation."""

    role: str
    """One of ROLES."""
    content: str
    """Text; "" for a reply of tool calls alone."""
    parts: NotRequired[list[Part]]
    """Text and images in order, for a message with images; `content` is the joined text of the parts."""
    tool_calls: NotRequired[list[ToolCall]]
    """Calls of an assistant's message, in order; never an empty list."""
    tool_call_id: NotRequired[str]
    """Id of the call that a message of the role `tool` answers."""
    name: NotRequired[str]
    """Name of the speaker, or of the function whose result a `tool` message contains."""
    reasoning: NotRequired[str]
    """Assistant's thoughts before the text."""
    train: NotRequired[bool]
    """Whether a supervised row trains on this turn, whatever data.train_on says. No template sees it."""


ToolSpec = dict[str, Any]
"""Tool in OpenAI's format: {"type": "function", "function": {"name", "description", "parameters"}}; `parameters` is a
JSON schema of an object."""


def name_of_tool(tool: ToolSpec) -> str:
    """Return the name under which a reply calls a tool."""
    return tool["function"]["name"]


def find_images(messages: Iterable[Message]) -> list[EncodedImage]:
    """List the images of a conversation, in order."""
    return [part["image"] for m in messages for part in m.get("parts", []) if part["type"] == "image"]


def with_text(message: Message, text: str) -> Message:
    """Return a message with another text, which stands between the images that it begins and ends with."""
    changed: Message = {**message, "content": text}
    if "parts" in message:
        parts = message["parts"]
        before = list(takewhile(_is_image, parts))
        # Only of the parts after `before`: a message of images alone must not repeat them.
        after = list(takewhile(_is_image, reversed(parts[len(before) :])))[::-1]
        changed["parts"] = [*before, {"type": "text", "text": text}, *after]
    return changed


def _is_image(part: Part) -> bool:
    return part["type"] == "image"


def describe_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Describe messages in JSON for files and other programs; images by hash and size, without the bytes."""
    return [describe_message(message) for message in messages]


def describe_message(message: Message) -> dict[str, Any]:
    """Describe a message in JSON; see `describe_messages`."""
    described: dict[str, Any] = {**message}
    if "parts" in message:
        described["parts"] = [
            describe_image(part["image"]) if part["type"] == "image" else part for part in message["parts"]
        ]
    return described
