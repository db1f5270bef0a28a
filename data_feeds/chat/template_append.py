"""Template text after a finished reply: tool results or user turns, up to the header of the next reply.

Sampled tokens are never rendered again. A placeholder reply with the same tool calls is rendered in their place, since
templates read the calls to write results. Only the text after the placeholder is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.types.messages import Message, ToolCall
from data_feeds.chat.turn_ends import ASKED, STAND_IN, TurnEnd, Write, common_start
from data_feeds.chat.turn_ends import ImagesDoNotFit as ImagesDoNotFit
from data_feeds.chat.turn_ends import TemplateRefuses as TemplateRefuses
from data_feeds.chat.turn_ends import TemplateRewrites as TemplateRewrites


def write_answers(write: Write, end: TurnEnd, reply: Message, answers: Sequence[Message]) -> str:
    """Render `answers` with the header of the next reply.

    Raises TemplateRewrites if the template changes the reply's turn once answers follow. A change before its content,
    such as dropped reasoning, is allowed. Raises TemplateRefuses if the template rejects the answers.
    """
    asked: list[Message] = [{"role": "user", "content": ASKED}]
    refusal = TemplateRefuses("the chat template refuses the answers to a reply")
    # Some templates reject several calls in one turn, others a result without its call. The first accepted placeholder
    # is used.
    for said in _list_stand_ins(reply, answers):
        try:
            before = write(asked, False)
            ended = write([*asked, said], False)
            whole = write([*asked, said, *answers], True)
        except TemplateRefuses as found:
            refusal = found
            continue
        return _cut_off_reply(before, ended, whole, end)
    raise refusal


def _list_stand_ins(reply: Message, answers: Sequence[Message]) -> Iterator[Message]:
    """Yield placeholder replies, the most similar to the real reply first."""
    calls = reply.get("tool_calls", [])
    yield _stand_in(calls)
    if len(calls) > 1:
        yield _stand_in(calls[:1])
    if results := [m for m in answers if m["role"] == "tool"]:
        yield _stand_in([_name_call(m.get("tool_call_id", STAND_IN), m.get("name", STAND_IN)) for m in results])


def _stand_in(calls: list[ToolCall]) -> Message:
    said: Message = {"role": "assistant", "content": STAND_IN}
    if calls:
        said["tool_calls"] = calls
    return said


def _name_call(call_id: str, name: str) -> ToolCall:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def _cut_off_reply(before: str, ended: str, whole: str, end: TurnEnd) -> str:
    """Return the part of `whole` after the reply.

    before: the text without the reply; ended: with the reply; whole: with the answers to it.
    """
    # what a template writes once, after the last turn, is no part of a turn
    before = common_start(before, ended)
    if ASKED not in before or not whole.startswith(before):
        raise TemplateRewrites(
            "the chat template rewrites earlier turns (a conversation's beginning is not the beginning of its "
            "continuation), so nothing can follow the tokens of a reply: use a template that only appends"
        )
    # The reply is compared from its content on. Templates may drop the reasoning before it once a reply is answered.
    begins = [text.find(STAND_IN, len(before)) for text in (ended, whole)]
    if -1 in begins:  # a template may write the calls and no content
        begins = [len(before)] * 2
    said = ended[begins[0] :]
    said = said[: end.cut_reply(said)]
    if not whole.startswith(said, begins[1]):
        raise TemplateRewrites(
            "the chat template writes a reply differently once it is answered, so nothing can follow its tokens: use a "
            "template that only appends"
        )
    at = begins[1] + len(said)
    # the policy has sampled the end, unless it belongs to the next turn
    return whole[(end.written == "after" and end.find_end(whole, at, in_history=True)) or at :]
