"""Messages of a conversation, tools included: the form in which rows, environments, agents and rewards exchange them.

OpenAI's form, with two differences: the arguments of a call are an object and not JSON text, and `content` is text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NotRequired, TypedDict

from core.types.images import EncodedImage, describe_image

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have."""


class FunctionCall(TypedDict):
    """Function that is called, with its arguments."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """Call of a tool in a reply."""

    id: str
    """Name of the call, which the message with its result repeats as `tool_call_id`."""
    type: Literal["function"]
    function: FunctionCall


class TextPart(TypedDict):
    """Text between images."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """EncodedImage in a message."""

    type: Literal["image"]
    image: EncodedImage


Part = TextPart | ImagePart


class Message(TypedDict):
    """Turn of a conversation."""

    role: str
    """One of ROLES."""
    content: str
    """Text of the turn; "" where a reply has tool calls and says nothing else."""
    parts: NotRequired[list[Part]]
    """Text and images in their order, where the turn has images; `content` is the text of these parts, joined."""
    tool_calls: NotRequired[list[ToolCall]]
    """Calls of an assistant's turn, in their order; never an empty list."""
    tool_call_id: NotRequired[str]
    """Call that a turn of the role `tool` answers."""
    name: NotRequired[str]
    """Who speaks, or the function whose result a turn of the role `tool` holds."""
    reasoning: NotRequired[str]
    """What an assistant thought before it spoke."""


ToolSpec = dict[str, Any]
"""Tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}, where `parameters`
is a JSON schema of an object."""


def name_of_tool(tool: ToolSpec) -> str:
    """Return the name by which a reply calls a tool."""
    return tool["function"]["name"]


def find_images(messages: Iterable[Message]) -> list[EncodedImage]:
    """Return the images of a conversation, in their order."""
    return [part["image"] for m in messages for part in m.get("parts", []) if part["type"] == "image"]


def describe_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as files and other programs read them: an image by its hash and size, without its bytes."""
    return [describe_message(message) for message in messages]


def describe_message(message: Message) -> dict[str, Any]:
    """Return one message as `describe_messages` does."""
    described: dict[str, Any] = {**message}
    if "parts" in message:
        described["parts"] = [
            describe_image(part["image"]) if part["type"] == "image" else part for part in message["parts"]
        ]
    return described
