"""A reply's text to a message: content, reasoning and tool calls. What cannot be read is said, and never raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from core.messages import Message, ToolSpec

if TYPE_CHECKING:
    from data_feeds.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """Reply of the policy, as an environment reads it."""

    message: Message
    problem: str = ""
    """One sentence, where the text holds a tool call that cannot be read; the message then is plain content."""


class ReplyParser(Protocol):
    """Reader of the replies of one family of models."""

    def parse(self, ids: list[int], text: str, tools: Sequence[ToolSpec]) -> ParsedReply:
        """Return what a reply says; `ids` are its tokens, `text` is what is decoded of them without special tokens."""
        ...


class PlainParser:
    """Reader of replies to prompts without tools: all of the text is content."""

    def parse(self, ids: list[int], text: str, tools: Sequence[ToolSpec]) -> ParsedReply:
        """Return the text as it is."""
        return ParsedReply(message={"role": "assistant", "content": text})


def make_parser(name: str | None, tokenizer: ChatTokenizer) -> ReplyParser:
    """Return the parser that `rollout.tool_parser` names."""
    return PlainParser()
