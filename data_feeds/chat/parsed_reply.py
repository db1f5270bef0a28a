"""Reply of the policy as it was read, and what reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.types.messages import FunctionCall, Message, ToolCall, ToolSpec
from data_feeds.chat.tool_specs import find_misfit


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """Reply of the policy, as an environment reads it."""

    message: Message
    """Content, reasoning and calls; all of the text as content, where a call of it cannot be read."""
    problem: str = ""
    """One sentence, where the text holds a tool call that cannot be made: it cannot be read, and `message` has no
    calls; or `message` has them, and a name is unknown or arguments do not fit."""


class ReplyParser(Protocol):
    """Reader of the replies of one family of models."""

    def parse(self, ids: list[int], text: str, tools: Sequence[ToolSpec]) -> ParsedReply:
        """Return what a reply says; `ids` are its tokens, `text` is what is decoded of them without special tokens."""
        ...


class PlainParser:
    """Reader that looks for nothing: all of the text is content."""

    def parse(self, ids: list[int], text: str, tools: Sequence[ToolSpec]) -> ParsedReply:
        """Return the text as it is."""
        return ParsedReply(message={"role": "assistant", "content": text})


def finish_reply(
    ids: list[int],
    *,
    content: str,
    reasoning: str,
    calls: Sequence[FunctionCall],
    tools: Sequence[ToolSpec],
) -> ParsedReply:
    """Return a reply whose calls could be read, with the reason why the first that cannot be made cannot."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            ToolCall(id=_name_call(repr(ids), n), type="function", function=call) for n, call in enumerate(calls)
        ]
    if reasoning:
        message["reasoning"] = reasoning
    misfits = (find_misfit(call, tools) for call in calls)
    return ParsedReply(message=message, problem=next(filter(None, misfits), ""))


def refuse_reply(text: str, problem: str) -> ParsedReply:
    """Return a reply with a call that cannot be read."""
    return ParsedReply(message={"role": "assistant", "content": text}, problem=problem)


def rename_taken(reply: Message, before: Iterable[Message]) -> Message:
    """Return a reply whose calls have ids that no call of the messages before it has.

    A reply is named by its tokens, so one that repeats an earlier one would have its ids, and a result two calls that
    it may answer. The new ids depend on the conversation alone.
    """
    calls = reply.get("tool_calls", [])
    taken = {call["id"] for message in before for call in message.get("tool_calls", [])} if calls else set[str]()
    if taken.isdisjoint(call["id"] for call in calls):
        return reply
    renamed: list[ToolCall] = []
    for n, call in enumerate(calls):
        new = call["id"]
        while new in taken:
            new = _name_call(new, n)
        taken.add(new)
        renamed.append({**call, "id": new})
    return {**reply, "tool_calls": renamed}


def _name_call(what: str, n: int) -> str:
    """Return an id for the nth call of a reply: nine letters and digits, which is what some templates ask for."""
    digest = hashlib.blake2b(what.encode(), digest_size=3).hexdigest()
    return f"{digest}{n:03d}"
