"""Text of a conversation and the character ranges to train on, found by rendering parts of the conversation.

The text is encoded as a whole. Encoded apart, a turn could begin with other tokens, such as a space before a word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from core.errors import UserError
from core.types.messages import Message, with_text
from data_feeds.chat.turn_ends import ASKED, STAND_IN, TemplateRewrites, TurnEnd, Write

TrainOn = Literal["everything", "last_reply"] | Sequence[str]
"""Trained part of a conversation: everything, the last reply, or all turns of the given roles."""
Piece = tuple[str, bool | list[range]]
"""Text to encode, and the trained part: all, none, or tokens that begin within these character ranges."""
OPENS_THOUGHT = "<think>"
LAST_TAG = re.compile(r"(<[^<>\s]+>)(\s*)\Z")
"""Tag that ends the header of a reply, such as <think>."""


def split_turns(write: Write, end: TurnEnd, messages: list[Message], train_on: TrainOn) -> Piece:
    """Return the text of a conversation up to the last reply or trained turn, and its trained ranges.

    Some templates render earlier replies differently from the last, for example without reasoning. Then an earlier
    reply can be trained on only if nothing of it is left out.
    """
    messages = messages[: count_written(messages, train_on)]
    if not messages:
        return "", False
    chosen = find_turns(messages, train_on)
    if train_on != "everything":
        return _Search(write, end, messages, chosen).find_ranges()
    if len(chosen) == len(messages):
        return write(messages, False), True
    text, left_out = _Search(write, end, messages, {*range(len(messages))} - chosen).find_ranges()
    bounds = [0, *(at for span in left_out for at in (span.start, span.stop)), len(text)]
    return text, [range(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]


@dataclass(frozen=True)
class _Search:
    write: Write
    end: TurnEnd
    messages: list[Message]
    chosen: set[int]
    """Indices of the trained turns."""

    def find_ranges(self) -> tuple[str, list[range]]:
        text, ranges = self.text, list[range]()
        for i in sorted(self.chosen):
            if self.messages[i]["role"] != "assistant":
                ranges.append(self._find_other(i))
                continue
            start, stop = self._find_reply(i)
            end = self.end.find_end(text, stop)
            # the policy learns to end its last turn too, where the template leaves that to the next one
            if end is None and i == len(self.messages) - 1:
                text = self._append_end(text, stop)
                end = len(text)
            ranges.append(range(start, end or stop))
        return text, ranges

    @cached_property
    def text(self) -> str:
        return self._render(self.messages)

    def _render(self, messages: list[Message]) -> str:
        """Render a conversation. The last reply is as the policy says it, if the template cuts off its beginning."""
        whole = self.write(messages, False)
        if len(messages) - 1 not in self.chosen or messages[-1]["role"] != "assistant":
            return whole
        content = messages[-1]["content"].strip()
        if not content or content in whole:
            return whole
        parts = self.write([*messages[:-1], with_text(messages[-1], ASKED)], False).split(ASKED)
        if len(parts) != 2 or not (whole.startswith(parts[0]) and whole.endswith(parts[1])):
            return whole
        written = whole[len(parts[0]) : len(whole) - len(parts[1])].strip()
        if not content.endswith(written):
            return whole
        return _join_header(self.write(messages[:-1], True), content) + parts[1]

    def _find_reply(self, i: int) -> tuple[int, int]:
        """Return the range of a reply in the text, without the token that ends its turn."""
        # rendered up to the reply twice, without and with it: the difference is the text that the policy samples
        asked, until = self.write(self.messages[:i], True), self._render(self.messages[: i + 1])
        said = until[len(asked) :]
        said = said[: self.end.cut_reply(said)]
        if not (self.text.startswith(asked) and until.startswith(asked) and self.text.startswith(said, len(asked))):
            return self._find_rewritten(i)
        return len(asked), len(asked) + len(said)

    def _find_rewritten(self, i: int) -> tuple[int, int]:
        """Return the same for a reply whose turn the template opens differently, according to what follows it."""
        message = self.messages[i]
        blank = with_text(message, STAND_IN)
        before, written, after = self._locate(i)
        alone = self.write([*self.messages[:i], blank], False).rpartition(STAND_IN)[2]
        # calls, which follow the content
        more = alone[: self.end.cut_reply(alone)]
        if written.strip() != message["content"].strip() or not after.startswith(more):
            raise _refuse("a part of a reply")
        header, opens = self.header
        # a header without reasoning stands directly before the content
        start = len(before) - len(header) if before.endswith(header) else before.rfind(opens) if opens else -1
        if start < 0:
            raise _refuse("the header of a reply")
        start += len(opens)
        if "reasoning" in message and message["reasoning"].strip() not in before[start:]:
            raise _refuse("the reasoning of a reply")
        return start, len(self.text) - len(after) + len(more)

    @cached_property
    def header(self) -> tuple[str, str]:
        """Text between a question and an earlier reply, and the part of it that the policy does not sample."""
        asked: list[Message] = [{"role": "user", "content": "."}]
        said: list[Message] = [{"role": "assistant", "content": STAND_IN}, *asked]
        unasked = self.write(asked, False)
        header = self.write([*asked, *said], False).removeprefix(unasked).partition(STAND_IN)[0]
        sampled_after = self.write(asked, True).removeprefix(unasked)
        return header, sampled_after if header.startswith(sampled_after) else header

    def _find_other(self, i: int) -> range:
        """Return the range of the content of a turn of another role. An end directly after it is included."""
        before, _, after = self._locate(i)
        at = len(self.text) - len(after)
        # the role learns to end its turn, as a reply does
        ends = next((len(end) for end in self.end.ends if after.startswith(end)), 0)
        return range(len(before), at + ends)

    def _locate(self, i: int) -> tuple[str, str, str]:
        """Return the text before a turn's content, the content as written, and the text after it."""
        # A placeholder in place of the content locates it. A search for the content itself could match another turn.
        blank = [*self.messages[:i], with_text(self.messages[i], STAND_IN), *self.messages[i + 1 :]]
        parts = self._render(blank).split(STAND_IN)
        text = self.text
        if len(parts) != 2 or not (text.startswith(parts[0]) and text.endswith(parts[1])):
            role = self.messages[i]["role"]
            if role == "assistant":
                raise _refuse("a part of a reply")
            raise UserError(
                "the chat template writes a turn differently according to its content, so turns of "
                f"{role} cannot be trained on: leave that role out of data.train_on"
            )
        return parts[0], text[len(parts[0]) : len(text) - len(parts[1])], parts[1]

    def _append_end(self, text: str, stop: int) -> str:
        """Return the text with an end after its last reply: the token with which a next turn begins, or the model's."""
        messages = self.messages
        if self.end.written == "next":
            calls = messages[-1].get("tool_calls")
            follows: Message = {"role": "user", "content": "."}
            if calls:
                follows = {"role": "tool", "content": ".", "tool_call_id": calls[0]["id"]}
            longer = self.write([*messages, follows], False)
            found = self.end.find_end(longer, stop) if longer.startswith(text) else None
            return text + self.end.text if found is None else longer[:found]
        return text[:stop] + self.end.text


def write_begun_reply(write: Write, messages: list[Message]) -> str:
    """Render a conversation whose last turn is the beginning of a reply, for the policy to continue."""
    content = messages[-1]["content"]
    asked = write(messages[:-1], True)
    before, found, _ = write([*messages[:-1], with_text(messages[-1], STAND_IN)], False).rpartition(STAND_IN)
    # templates write an empty thought before a reply without one, but a begun thought is the policy's own
    return before + content if found and not content.startswith(OPENS_THOUGHT) else _join_header(asked, content)


def _join_header(asked: str, said: str) -> str:
    """Return a conversation with the reply to it, whose reasoning the header of a reply may have opened already."""
    tag = LAST_TAG.search(asked)
    if tag and said.startswith(tag[1]):
        said = said.removeprefix(tag[1]).removeprefix(tag[2])
    return asked + said


def _refuse(what: str) -> TemplateRewrites:
    return TemplateRewrites(
        f"the chat template rewrites earlier turns (it leaves out or changes {what} that other turns follow), so they "
        "cannot be trained on one by one: use a template that only appends, or data.train_on: last_reply"
    )


def _find_replies(messages: list[Message]) -> list[int]:
    return [i for i, m in enumerate(messages) if m["role"] == "assistant"]


def find_turns(messages: list[Message], train_on: TrainOn) -> set[int]:
    """Return the indices of the trained turns: those that `train_on` names, unless a turn's `train` says otherwise."""
    last = _find_replies(messages)[-1:]

    def is_named(i: int, message: Message) -> bool:
        if isinstance(train_on, str):
            return train_on == "everything" or i in last
        return message["role"] in train_on

    return {i for i, m in enumerate(messages) if m.get("train", is_named(i, m))}


def count_written(messages: list[Message], train_on: TrainOn) -> int:
    """Return the number of messages up to the last reply or trained turn."""
    return 1 + max([*_find_replies(messages), *find_turns(messages, train_on)], default=-1)
