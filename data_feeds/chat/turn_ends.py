"""End of an assistant turn: the token after a reply, found by rendering conversations with the chat template.

The engine stops at it, supervised rows are trained up to it, and episodes go on after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from core.errors import UserError, quote
from core.types.messages import Message

STAND_IN = "\u2402"
"""Placeholder text that can be found again in a rendered conversation."""
ASKED = "\u2403"
"""Placeholder of another turn beside it."""
Write = Callable[[list[Message], bool], str]
"""Renders a conversation as text. The flag adds the header of the next reply."""
KEY = "data.end_of_turn"
Written = Literal["after", "next", "never"]
"""after: the template writes the end after every reply. next: the end is the first token of the next turn. never: the
template writes none."""


class TemplateRefuses(UserError):
    """Error raised when the chat template rejects a conversation."""


class ImagesDoNotFit(TemplateRefuses):
    """Error of a conversation without exactly one placeholder per image."""


class TemplateRewrites(UserError):
    """Error raised when a chat template changes earlier turns after later turns are appended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """End of an assistant turn, as text."""

    text: str
    """Text of the end: a token, or letters if the tokenizer has no token for it."""
    written: Written
    is_token: bool
    closing: str
    """Text from the content of an earlier reply to the end of its turn."""
    ends: tuple[str, ...]
    """Texts of all tokens at which a reply may end."""
    n_after: int
    """Number of `ends` that the template writes after the last reply."""
    in_history: str
    """Token that the template writes after earlier replies, if it is not one of `ends`."""

    def cut_reply(self, text: str) -> int:
        """Return the length of a reply without its end. text: what the template writes from the reply to the end."""
        length = len(text)
        # from the end, since the reply may contain the text of an end too
        for _ in range(self.n_after):
            found = re.search(rf"({_any_of(self.ends)})\s*\Z", text[:length])
            if found is None:
                break
            length = found.start()
        return length if length < len(text) or self.written == "next" else len(text.rstrip())

    def find_end(self, text: str, at: int, *, in_history: bool = False) -> int | None:
        """Return the position after the end that follows `at`, or None. in_history: count `in_history` as an end."""
        ends = (*self.ends, *filter(None, [self.in_history if in_history else ""]))
        found = re.compile(rf"\s*({_any_of(ends)})").match(text, at)
        return None if found is None else found.end()


def find_turn_end(write: Write, *, tokens: Collection[str], stops: Sequence[str], named: str | None) -> TurnEnd:
    """Return the end of a turn, from the template's text after a reply.

    tokens: texts of the tokenizer's added tokens. stops: tokens at which the model's files say to stop, the end of
    sequence first. named: value of data.end_of_turn.
    """
    asked: Message = {"role": "user", "content": ASKED}
    said: Message = {"role": "assistant", "content": STAND_IN}
    try:
        header = write([asked], False).partition(ASKED)[0]
        last, earlier = (_after_stand_in(write([asked, said, *more], False)) for more in ([], [asked]))
    except TemplateRefuses:  # its words are told where a row is rendered
        header, last, earlier = "", stops[0], stops[0]
    if named is not None and named not in (*tokens, *stops):
        raise UserError(f"{KEY}={quote(named)} is not a token of this model's tokenizer: name one, or add it to it")
    token = re.compile(_any_of(tokens)) if tokens else re.compile(r"(?!)")
    text, is_token = _choose(last, earlier, token, stops) if named is None else (named, True)
    ends = tuple(dict.fromkeys([text, *stops]))
    next_token = token.match(earlier.lstrip())
    opens = next_token is not None and next_token.group() == text
    written: Written = "after" if text in last else "next" if opens else "never"
    between = earlier.partition(ASKED)[0]
    # a template may end earlier replies with another token than the last, before the header of the next question
    own = between.removesuffix(common_start(between[::-1], header[::-1])[::-1])
    history = text if text in between or written != "after" else next(iter(token.findall(own)), text)
    return TurnEnd(
        text=text,
        written=written,
        is_token=is_token,
        closing=between[: between.index(history) + len(history)] if history in between and written == "after" else "",
        ends=ends,
        n_after=len(re.findall(_any_of(ends), last)),
        in_history=history if history not in ends else "",
    )


def _choose(last: str, earlier: str, token: re.Pattern[str], stops: Sequence[str]) -> tuple[str, bool]:
    """Return the end of a turn and whether it is a token.

    last, earlier: text after the last reply of a conversation, and after an earlier one.
    """
    # what stands after both kinds of replies ends a turn; what else stands after the last one ends the text
    both = common_start(last, earlier)
    in_both = [m.group() for m in token.finditer(last) if m.end() <= len(both)]
    if in_both:
        return in_both[-1], True
    in_last: list[str] = token.findall(last)
    if in_last:
        return next((t for t in in_last if t in stops), in_last[0]), True
    if letters := both.strip():
        return letters, False
    opens = token.match(earlier.lstrip())
    return (opens.group() if opens else stops[0]), True


def common_start(one: str, other: str) -> str:
    """Return the longest text with which both begin."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differ, min(len(one), len(other)))]


def _after_stand_in(text: str) -> str:
    _, found, after = text.rpartition(STAND_IN)
    return after if found else ""


def _any_of(texts: Collection[str]) -> str:
    # the longest first: one token's text may begin with another's
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
