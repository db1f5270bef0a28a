"""Split a conversation into pieces to encode: each assistant turn alone, and the text between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from core.errors import UserError
from core.types.messages import Message, with_text
from data_feeds.chat.template_append import STAND_IN, TemplateRewrites, Write

TrainOn = Literal["everything", "last_reply"] | Sequence[str]
"""Trained part of a conversation: everything, the last reply, or all turns of the given roles."""
Piece = tuple[str, bool | list[range]]
"""Text to encode, and the trained part: all, none, or tokens that begin within these character ranges."""


def split_turns(write: Write, end_of_turn: str, messages: list[Message], train_on: TrainOn) -> list[Piece]:
    """Return the pieces of a conversation in order, up to the last trained turn.

    Some templates render earlier replies differently from the last, for example without reasoning. Then only the last
    reply can be trained on. It follows the conversation as rendered before that reply.
    """
    try:
        return _Cut(write, end_of_turn, messages, train_on).all_pieces()
    except TemplateRewrites as rewrites:
        chosen = _find_turns(messages, train_on)
        if train_on != "last_reply" or not chosen <= {*_find_replies(messages)[-1:]}:
            raise TemplateRewrites(f"{rewrites}, or data.train_on: last_reply") from rewrites
        return _cut_before_last_reply(write, end_of_turn, messages, learnt=bool(chosen))


@dataclass(frozen=True)
class _Cut:
    write: Write
    end_of_turn: str
    messages: list[Message]
    train_on: TrainOn

    @cached_property
    def chosen(self) -> set[int]:
        """Indices of the trained turns."""
        return _find_turns(self.messages, self.train_on)

    def all_pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        whole_text = self.train_on == "everything"
        done, after = "", 0
        # render up to each reply twice, without and with it: the difference is the text that the policy samples
        for i in _find_replies(self.messages):
            asked = self.write(self.messages[:i], True)
            whole = self.write(self.messages[: i + 1], False)
            _check_appends(done, asked, whole)
            between = self.learn_part({*range(after, i)}, asked, skip=len(done))
            reply, rest = _split_reply(whole[len(asked) :], self.end_of_turn)
            pieces += [(asked[len(done) :], between), (reply, i in self.chosen), (rest, whole_text)]
            done, after = whole, i + 1
        # trained turns of other roles after the last reply
        if left := {j for j in self.chosen if j >= after}:
            whole = self.write(self.messages[: max(left) + 1], False)
            _check_appends(done, whole)
            pieces.append((whole[len(done) :], self.learn_part({*range(after, max(left) + 1)}, whole, skip=len(done))))
        return pieces

    def learn_part(self, turns: set[int], text: str, *, skip: int) -> bool | list[range]:
        """Return the trained part of the text from `skip` on, which has these turns and no reply."""
        if self.train_on != "everything":
            return self.find_spans(turns & self.chosen, skip=skip)
        if not (left_out := self.find_spans(turns - self.chosen, skip=skip)):
            return True
        ends = [0, *(at for span in sorted(left_out, key=lambda span: span.start) for at in (span.start, span.stop))]
        return [range(*pair) for pair in zip(ends[::2], [*ends[1::2], len(text) - skip], strict=True)]

    def find_spans(self, turns: set[int], *, skip: int) -> list[range]:
        """Return the character range of each turn's content, relative to `skip`.

        An end-of-turn token directly after the content is included.
        """
        return [range(span.start - skip, span.stop - skip) for span in map(self._find_span, turns)]

    def _find_span(self, turn: int) -> range:
        until = self.messages[: turn + 1]
        # A placeholder in place of the content locates it. A search for the content itself could match an earlier turn.
        blank = with_text(until[-1], STAND_IN)
        header, _, tail = self.write([*until[:-1], blank], False).rpartition(STAND_IN)
        whole = self.write(until, False)
        _check_appends(header, whole)
        if not whole.endswith(tail):
            raise UserError(
                "the chat template writes a turn differently according to its content, so turns of "
                f"{until[-1]['role']} cannot be trained on: leave that role out of data.train_on"
            )
        # the role learns to end its turn, as a reply does
        ends = len(self.end_of_turn) if tail.startswith(self.end_of_turn) else 0
        return range(len(header), len(whole) - len(tail) + ends)


def _cut_before_last_reply(write: Write, end_of_turn: str, messages: list[Message], *, learnt: bool) -> list[Piece]:
    last = _find_replies(messages)[-1]
    asked = write(messages[:last], True)
    whole = write(messages[: last + 1], False)
    _check_appends(asked, whole)
    reply, rest = _split_reply(whole[len(asked) :], end_of_turn)
    return [(asked, False), (reply, learnt), (rest, False)]


def _split_reply(text: str, end_of_turn: str) -> tuple[str, str]:
    """Split a reply after its end-of-turn token. Raises UserError if the template writes another one."""
    end = text.find(end_of_turn)
    if end < 0:
        raise UserError(
            f"the chat template does not end a turn with the tokenizer's end-of-sequence token "
            f"{end_of_turn!r}, where the policy would stop: make eos_token the one the template writes"
        )
    end += len(end_of_turn)
    return text[:end], text[end:]


def _find_replies(messages: list[Message]) -> list[int]:
    return [i for i, m in enumerate(messages) if m["role"] == "assistant"]


def _find_turns(messages: list[Message], train_on: TrainOn) -> set[int]:
    """Return the indices of the trained turns: those that `train_on` names, unless a turn's `train` says otherwise."""
    last = _find_replies(messages)[-1:]

    def is_named(i: int, message: Message) -> bool:
        if isinstance(train_on, str):
            return train_on == "everything" or i in last
        return message["role"] in train_on

    return {i for i, m in enumerate(messages) if m.get("train", is_named(i, m))}


def count_written(messages: list[Message], train_on: TrainOn) -> int:
    """Return the number of messages up to the last reply or trained turn."""
    return 1 + max([*_find_replies(messages), *_find_turns(messages, train_on)], default=-1)


def _check_appends(*longer: str) -> None:
    if not all(after.startswith(before) for before, after in pairwise(longer)):
        raise TemplateRewrites(
            "the chat template rewrites earlier turns (a conversation's beginning is not the beginning of its "
            "continuation), so turns cannot be trained on one by one: use a template that only appends"
        )
