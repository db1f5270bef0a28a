"""Parsed reply of the policy, and the protocol of reply parsers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.types.messages import FunctionCall, Message, ToolCall, ToolSpec
from data_feeds.chat.tool_specs import find_misfit


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """Reply of the policy, parsed into content, reasoning and tool calls."""

    message: Message
    """Content, reasoning and calls. If a call cannot be parsed, the whole text is content, or all but thoughts."""
    refusal: str = ""
    """One sentence about a tool call that cannot be parsed, else ""."""
    tools: Sequence[ToolSpec] = ()
    """Tools that were offered."""

    @property
    def problem(self) -> str:
        """One sentence about a tool call that cannot be executed, else "". Without calls in `message`, parsing failed.

        Otherwise a name is unknown, or arguments violate their schema. Checked only when read: an agent runs its calls
        itself, and a pattern in its schema could take for ever.
        """
        misfits = (find_misfit(call["function"], self.tools) for call in self.message.get("tool_calls", []))
        return self.refusal or next(filter(None, misfits), "")


class ReplyParser(Protocol):
    """Parser of replies, for one family of models."""

    def parse(self, ids: list[int], text: str, tools: Sequence[ToolSpec]) -> ParsedReply:
        """Parse a reply. It never raises; problems are reported in the result.

        ids: tokens of the reply. text: the same tokens decoded without special tokens.
        """
        ...


class PlainParser:
    """Parser that finds neither calls nor reasoning: all text is content."""

    def parse(self, ids: list[int], text: str, tools: Sequence[ToolSpec]) -> ParsedReply:
        """Return the text unchanged."""
        return ParsedReply(message={"role": "assistant", "content": text})


def finish_reply(
    ids: list[int],
    *,
    content: str,
    reasoning: str,
    calls: Sequence[FunctionCall],
    tools: Sequence[ToolSpec],
) -> ParsedReply:
    """Return a parsed reply."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            ToolCall(id=_name_call(repr(ids), n), type="function", function=call) for n, call in enumerate(calls)
        ]
    if reasoning:
        message["reasoning"] = reasoning
    return ParsedReply(message=message, tools=tools)


def refuse_reply(text: str, problem: str) -> ParsedReply:
    """Return a reply whose tool call cannot be parsed."""
    return ParsedReply(message={"role": "assistant", "content": text}, refusal=problem)


def rename_taken(reply: Message, before: Iterable[Message]) -> Message:
    """Rename call ids that already occur earlier in the conversation.

    Ids are hashes of the reply's tokens. A repeated reply would repeat ids, and a tool result would match two calls.
    The new ids depend on the conversation alone.
    """
    calls = reply.get("tool_calls", [])
    taken = {call["id"] for message in before for call in message.get("tool_calls", [])} if calls else set[str]()
    if taken.isdisjoint(call["id"] for call in calls):
        return reply
    renamed: list[ToolCall] = []
    for n, call in enumerate(calls):
        new = call["id"]
        # hash again until the id is free: the same conversation gives the same ids, on every run and machine
        while new in taken:
            new = _name_call(new, n)
        taken.add(new)
        renamed.append({**call, "id": new})
    return {**reply, "tool_calls": renamed}


def _name_call(what: str, n: int) -> str:
    """Return an id for the nth call of a reply. Some templates require exactly nine letters and digits."""
    # six hex digits and three digits of n
    digest = hashlib.blake2b(what.encode(), digest_size=3).hexdigest()
    return f"{digest}{n:03d}"
