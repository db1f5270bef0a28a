"""Tool-call formats of model families, as response templates of transformers.

A response template gives the delimiters of reasoning and tool calls in a reply, and how to parse each. The rest is
content. A tokenizer may have its own template; these serve tokenizers without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CALL = {"type": "function", "function": "{content}"}
"""Result of a region of JSON: a function call."""
REASONING = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"content": "text", "repeats": True, "join": "\n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """Tool-call format of a model family."""

    template: dict[str, Any]
    """Response template of transformers."""
    arguments: tuple[str, ...] = ("arguments",)
    """Keys that may contain the arguments of a call."""
    begins: tuple[str, ...] | None = None
    """Texts that open a region and may already stand in the reply header, such as "<think>". With None, transformers
    finds the start of the reply in the header."""


HERMES = ReplyForm(
    template={
        "start_anchor_pattern": r"\A",
        "fields": {
            "thinking": REASONING,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": CALL,
            },
            "content": CONTENT,
        },
    },
    begins=("<think>",),
)
"""Hermes, Qwen2.5, Qwen3, SmolLM3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""
LLAMA3_JSON = ReplyForm(
    template={
        "start_anchor_pattern": r"\A",
        "fields": {
            "tool_calls": {
                # a bare {"name": opens a call only at the start of the reply or after ";", or every JSON text would be
                # a call
                "open_pattern": r'(?:\A|(?<=;))\s*(?:<\|python_tag\|>(?=\s*\{)|(?=\{\s*"name"\s*:))',
                "close_pattern": r';(?=\s*(?:<\|python_tag\|>\s*)?\{\s*"name"\s*:)',
                "repeats": True,
                "content": "json",
                "transform": CALL,
            },
            "content": CONTENT,
        },
    },
    arguments=("arguments", "parameters"),
    begins=(),
)
"""Llama 3: the whole reply is a call, {"name": ..., "parameters": {...}}. Several calls are separated by ";"."""
REPLY_FORMS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}
