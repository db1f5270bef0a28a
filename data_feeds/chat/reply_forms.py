"""Forms in which families of models write tool calls, as response templates of transformers.

A response template says where the regions of a reply begin and end (reasoning, calls, and content, which is the rest)
and how each is read. A tokenizer may bring its own; these are for tokenizers that have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CALL = {"type": "function", "function": "{content}"}
"""What a region of JSON becomes: the call of a function."""
REASONING = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"content": "text", "repeats": True, "join": "\n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """Form of a reply."""

    template: dict[str, Any]
    """Response template of transformers."""
    arguments: tuple[str, ...] = ("arguments",)
    """Keys of a call that may hold its arguments."""
    begins: tuple[str, ...] | None = None
    """Texts with which a header of a reply may already begin a region, such as "<think>". None: the template finds the
    reply's beginning in the header by itself."""


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
"""Llama 3: a reply that is the call and nothing else, {"name": ..., "parameters": {...}}; several with ";" between."""
REPLY_FORMS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}
