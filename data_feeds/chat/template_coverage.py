"""Detect messages or fields that a chat template silently drops."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from core.errors import UserError, quote, shorten
from core.types.messages import Message, ToolSpec, with_text
from data_feeds.chat.template_append import STAND_IN, TemplateRefuses
from data_feeds.chat.tokenizer import ChatTokenizer

CLOSES_THOUGHT = "</think>"
Shape = tuple[Any, ...]
"""Features of a message, besides its text, that may change the template's output."""


class TemplateCoverage:
    """Check that the chat template writes all fields of a source's rows.

    Each field is removed in turn. If the rendered text stays the same, the template drops the field. Rows of the same
    shape render alike, so only the first of each shape is checked.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self.tokenizer = tokenizer
        self.seen: set[Shape] = set()

    def check(self, messages: list[Message], tools: Sequence[ToolSpec], where: str) -> None:
        """Raise UserError if the template drops a field of the row. `where` begins the message."""
        if tools and self._is_new(("tools", messages[0]["role"])) and self._is_same(messages, messages, tools, ()):
            self._refuse(where, "the tools", "remove the column tools, or the tools of rollout.env")
        for i, message in enumerate(messages):
            before = messages[i - 1]["role"] if i else ""
            if message.keys() > {"role", "content"} and self._is_new(_shape_of(message, before, bool(tools))):
                self._check_message(messages[: i + 1], tools, where)
        self._check_order(messages, tools, where)

    def check_content(
        self, messages: list[Message], tools: Sequence[ToolSpec], text: str, trained: Collection[int], where: str
    ) -> None:
        """Raise UserError if the template leaves out a turn's text, or a part of it.

        text: these messages as rendered. trained: indices of the turns to train on, of which nothing may be left out.
        """
        squeezed = ""
        for i, message in enumerate(messages):
            for content in _list_texts(message, is_trained=i in trained):
                if content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text:
                    continue
                # templates may strip lines, or open a thought in the header of a reply
                squeezed = squeezed or _squeeze(text)
                if _squeeze(content) not in squeezed:
                    what = f"a part of what a turn of {message['role']} holds ({quote(shorten(content))})"
                    self._refuse(where, what, "remove it")
            before = messages[i - 1]["role"] if i else ""
            # a short text may stand elsewhere too
            if message["content"].strip() and self._is_new(("content", *_shape_of(message, before, bool(tools)))):
                blank = [*messages[:i], with_text(message, STAND_IN), *messages[i + 1 :]]
                if not self._writes(blank, tools):
                    self._refuse(where, f"the content of a turn of {message['role']}", "remove it")

    def _writes(self, messages: list[Message], tools: Sequence[ToolSpec]) -> bool:
        """Return whether the template writes the placeholder. A rejected conversation counts as written."""
        try:
            return STAND_IN in self.tokenizer.render_text(messages, reply_next=False, tools=tools)
        except TemplateRefuses:
            return True

    def _check_message(self, until: list[Message], tools: Sequence[ToolSpec], where: str) -> None:
        """Check the last of these messages, rendered as the end of the conversation."""
        message = until[-1]
        before = until[:-1]
        calls = message.get("tool_calls", [])
        # one call at a time: a template may write only the first of several
        for i in range(len(calls)):
            fewer = _without(message, "tool_calls")
            if left := calls[:i] + calls[i + 1 :]:
                fewer["tool_calls"] = left
            if self._is_same(until, [*before, fewer], tools):
                which = "tool_calls" if len(calls) == 1 else f"call {i + 1} of {len(calls)} of one reply"
                self._refuse(where, which, "leave such rows out")
        # a template may write calls or content, but not both
        if calls and message["content"].strip() and self._is_same(until, [*before, with_text(message, "")], tools):
            self._refuse(where, "the content of a turn that has tool_calls", "empty that content")
        if "reasoning" in message and self._is_same(until, [*before, _without(message, "reasoning")], tools):
            self._refuse(where, "reasoning", "remove it, or write it into the content")
        # a result's name that only repeats its call adds nothing, so it may be dropped
        says_more = "name" in message and not _names_its_call(message, before)
        if says_more and self._is_same(until, [*before, _without(message, "name")], tools):
            self._refuse(where, "the name of a message", "remove it, or write it into the content")

    def _check_order(self, messages: list[Message], tools: Sequence[ToolSpec], where: str) -> None:
        """Raise UserError for tool results out of order, if the template does not write their ids.

        Without ids, the model can match results to calls only by their order.
        """
        waiting: list[str] = []
        for i, message in enumerate(messages):
            waiting = [call["id"] for call in message["tool_calls"]] if "tool_calls" in message else waiting
            answered = message.get("tool_call_id")
            if answered is None or answered not in waiting:
                continue
            if waiting[0] != answered:
                until = messages[: i + 1]
                if self._is_same(until, [*until[:-1], _without(message, "tool_call_id")], tools):
                    self._refuse(where, "tool_call_id", "bring results into the order of their calls")
            waiting.remove(answered)

    def _is_new(self, shape: Shape) -> bool:
        is_new = shape not in self.seen
        self.seen.add(shape)
        return is_new

    def _is_same(
        self,
        whole: list[Message],
        less: list[Message],
        tools: Sequence[ToolSpec],
        less_tools: Sequence[ToolSpec] | None = None,
    ) -> bool:
        """Return whether the template renders both versions alike. A rejected version counts as different."""
        written = self.tokenizer.render_text(whole, reply_next=False, tools=tools)
        try:
            return written == self.tokenizer.render_text(
                less, reply_next=False, tools=tools if less_tools is None else less_tools
            )
        # the removed field made it reject the rest, so the template reads the field
        except TemplateRefuses:
            return False

    def _refuse(self, where: str, what: str, fix: str) -> None:
        if self.tokenizer.template == "plain":
            raise UserError(f"{where}: data.template=plain leaves out {what}: use data.template=chat, or {fix}")
        raise UserError(
            f"{where}: the chat template leaves out {what}: use a model or a template that writes it, or {fix}"
        )


def _list_texts(message: Message, *, is_trained: bool) -> list[str]:
    """Return the texts of a message that its turn must show. Of an earlier reply, templates leave the thoughts out."""
    parts = [part["text"] for part in message.get("parts", []) if part["type"] == "text"]
    texts = parts or [message["content"]]
    if message["role"] == "assistant" and not is_trained:
        texts = [text.rpartition(CLOSES_THOUGHT)[2] for text in texts]
    elif "reasoning" in message:
        texts.append(message["reasoning"])
    return [text.strip() for text in texts if text.strip()]


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _shape_of(message: Message, before: str, has_tools: bool) -> Shape:
    calls = len(message.get("tool_calls", []))
    optional = ("reasoning", "name", "tool_call_id")
    said = bool(message["content"].strip())
    return (message["role"], before, has_tools, calls, said, *(name in message for name in optional))


def _without(message: Message, field: str) -> Message:
    fewer: Any = {key: value for key, value in message.items() if key != field}
    return fewer


def _names_its_call(message: Message, before: list[Message]) -> bool:
    """Return whether a tool result's name is that of a function called earlier."""
    called = {call["function"]["name"] for m in before for call in m.get("tool_calls", [])}
    return message["role"] == "tool" and message.get("name") in called
