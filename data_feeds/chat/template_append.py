"""The text that follows a finished reply: the answers to it, up to the point where the next reply begins.

What the policy sampled is never written again. So the answers are written after a stand-in for the reply, which makes
the reply's own calls, since templates look at them to write results; only what comes after it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from core.errors import UserError
from core.types.messages import Message, ToolCall

STAND_IN = "\u2402"
"""Placeholder of a text, which can be found again in a rendered conversation."""
Write = Callable[[list[Message], bool], str]
"""Writes a conversation as text; true: with the header of the next reply."""


class TemplateRefuses(UserError):
    """Error of a chat template that refuses a conversation."""


class TemplateRewrites(UserError):
    """Error of a chat template that writes earlier turns differently once others follow them."""


def write_answers(write: Write, end_of_turn: str, reply: Message, answers: Sequence[Message]) -> str:
    """Return the text of `answers`, with the header of the next reply.

    Raises TemplateRewrites where a template writes the reply's turn differently because answers follow it, apart from
    what stands before its content (some leave out the reasoning there), and TemplateRefuses where it refuses them.
    """
    asked: list[Message] = [{"role": "user", "content": "."}]
    refusal = TemplateRefuses("the chat template refuses the answers to a reply")
    for said in _list_stand_ins(reply, answers):
        try:
            before = write(asked, False)
            ended = write([*asked, said], False)
            whole = write([*asked, said, *answers], True)
        except TemplateRefuses as found:
            refusal = found
            continue
        return _cut_off_reply(before, ended, whole, end_of_turn)
    raise refusal


def _list_stand_ins(reply: Message, answers: Sequence[Message]) -> Iterator[Message]:
    """Yield stand-ins for a reply, the one most like it first: a template may refuse several calls, or none."""
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


def _cut_off_reply(before: str, ended: str, whole: str, end_of_turn: str) -> str:
    """Return `whole` without the turns before the answers.

    before: the text without the reply; ended: with the reply; whole: with the answers to it.
    """
    if not (ended.startswith(before) and whole.startswith(before)):
        raise TemplateRewrites(
            "the chat template rewrites earlier turns (a conversation's beginning is not the beginning of its "
            "continuation), so nothing can follow the tokens of a reply: use a template that only appends"
        )
    ends = ended.count(end_of_turn, len(before))  # the arguments of a call may hold this text too
    end_alone, end = (_find_nth(text, end_of_turn, ends, len(before)) for text in (ended, whole))
    if not ends:
        end_alone = end = len(ended)
    begins = [text.find(STAND_IN, len(before)) for text in (ended, whole)]
    if -1 in begins:  # a template may write the calls alone
        begins = [len(before)] * 2
    if ended[begins[0] : end_alone] != whole[begins[1] : end]:
        raise TemplateRewrites(
            "the chat template writes a reply differently once it is answered, so nothing can follow its tokens: use a "
            "template that only appends"
        )
    return whole[end:]


def _find_nth(text: str, part: str, times: int, start: int) -> int:
    """Return where the nth occurrence of `part` ends, or the end of the text where there are fewer."""
    at = start
    for _ in range(times):
        found = text.find(part, at)
        if found < 0:
            return len(text)
        at = found + len(part)
    return at
