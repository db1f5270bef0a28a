"""Characters of a conversation that are trained on, under templates that write replies in one way or in two."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import UserError
from data_feeds.chat.turn_ends import TemplateRefuses, TemplateRewrites, find_turn_end
from data_feeds.chat.turns import split_turns, write_begun_reply
from unit_tests.helpers.chat_families import assistant, call, user
from unit_tests.helpers.sentences import tell
from unit_tests.helpers.written_turns import TOKENS, Template

SYSTEM: Any = {"role": "system", "content": "sys"}
TALK: list[Any] = [SYSTEM, user("qq"), assistant("aaaa"), user("r"), assistant("bbb"), user("tt")]
SHORT: list[Any] = [user("qq"), assistant("aaaa")]
LONG: list[Any] = TALK[1:5]
WHOLE = "<u>sys<u>qq<a>aaaa</a><u>r<a>bbb</a><u>tt"
REPLIES = ("assistant",)


def find(template: Template, messages: list[Any], train_on: Any, stops: tuple[str, ...] = ("</s>",)) -> Any:
    """Return the text of a conversation, and its trained parts."""
    end = find_turn_end(template, tokens=TOKENS, stops=stops, named=None)
    text, learnt = split_turns(template, end, messages, train_on)
    return text, [text[span.start : span.stop] for span in learnt] if isinstance(learnt, list) else learnt


def without(*numbers: int) -> list[Any]:
    return [{**message, "train": False} if i in numbers else message for i, message in enumerate(TALK)]


@pytest.mark.parametrize(
    ("messages", "train_on", "text", "learnt"),
    [
        (TALK, REPLIES, WHOLE[:-5], ["aaaa</a>", "bbb</a>"]),
        (TALK, "last_reply", WHOLE[:-5], ["bbb</a>"]),
        (TALK, ("user",), WHOLE, ["qq", "r", "tt"]),
        (TALK, ("system", "assistant"), WHOLE[:-5], ["sys", "aaaa</a>", "bbb</a>"]),
        (TALK, "everything", WHOLE, True),
        (without(2, 3), "everything", WHOLE, ["<u>sys<u>qq<a>", "<u>", "<a>bbb</a><u>tt"]),
        (without(0, 5), "everything", WHOLE[:-5], ["<u>", WHOLE[6:-5]]),
        (without(4), "last_reply", WHOLE[:-5], []),
        ([user("qq")], REPLIES, "", False),
        ([], "everything", "", False),
    ],
)
def test_what_is_trained_on_is_the_chosen_turns_to_the_letter(messages, train_on, text, learnt):
    assert find(Template(), messages, train_on) == (text, learnt)


NEXT = Template(end=lambda message, is_last: "" if is_last else "\n")
NEVER = Template(question="", end=lambda message, is_last: " ")


@pytest.mark.parametrize(
    ("template", "messages", "train_on", "text", "learnt"),
    [
        # the first token of the next turn ends a reply, of the last one too
        (NEXT, LONG, REPLIES, "<u>qq<a>aaaa\n<u>r<a>bbb\n<u>", ["aaaa\n<u>", "bbb\n<u>"]),
        (NEXT, [user("qq"), assistant("aaaa ")], REPLIES, "<u>qq<a>aaaa \n<u>", ["aaaa \n<u>"]),
        (NEXT, LONG[:3], ("user",), "<u>qq<a>aaaa\n<u>r", ["qq", "r"]),
        # what stands after the last reply alone goes before the end
        (
            Template(end=lambda message, is_last: "!" if is_last else ""),
            SHORT,
            REPLIES,
            "<u>qq<a>aaaa!<u>",
            ["aaaa!<u>"],
        ),
        # the template writes none, and the last reply gets the model's in place of white space
        (NEVER, LONG, REPLIES, "qq<a>aaaa r<a>bbb</s>", ["aaaa", "bbb</s>"]),
        (NEVER, LONG[:3], ("assistant", "user"), "qq<a>aaaa r", ["qq", "aaaa", "r"]),
        # questions end too
        *(
            (
                Template(question_end=end),
                LONG[:3],
                ("user",),
                f"<u>qq{end}<a>aaaa</a><u>r{end}",
                [f"qq{end}", f"r{end}"],
            )
            for end in ("</a>", "</s>")
        ),
        (Template(question_end="<h>"), SHORT, ("user",), "<u>qq<h><a>aaaa</a>", ["qq"]),
    ],
)
def test_a_turn_is_trained_on_to_its_end_wherever_that_stands(template, messages, train_on, text, learnt):
    assert find(template, messages, train_on) == (text, learnt)


def write_calls(message: Any, is_last: bool) -> str:
    if message.get("tool_call_id", "c1") != "c1":
        raise TemplateRefuses("another result comes first")
    calls = message.get("tool_calls", [])
    return message["content"] + "".join(f"[{one['function']['name']}]" for one in calls)


def test_a_reply_of_calls_ends_with_the_token_that_begins_a_result():
    messages = [user("qq"), assistant("", call("f", "c1"), call("g", "c2"))]
    template = Template(end=NEXT.end, content=write_calls)
    assert find(template, messages, REPLIES, ("</s>", "<o>")) == ("<u>qq<a>[f][g]\n<o>", ["[f][g]\n<o>"])


CUT = Template(content=lambda message, is_last: message["content"].rpartition("|")[2])
"""Leaves out the beginning of every turn."""
OPENED = Template(content=CUT.content, opens="<a><think>\n")


@pytest.mark.parametrize(
    ("template", "messages", "train_on", "text", "learnt"),
    [
        (CUT, [user("qq"), assistant("h|yy")], REPLIES, "<u>qq<a>h|yy</a>", ["h|yy</a>"]),
        (CUT, [user("qq"), assistant(" h|yy ")], REPLIES, "<u>qq<a>h|yy</a>", ["h|yy</a>"]),
        (CUT, [user("qq"), assistant("h|yy")], ("user",), "<u>qq<a>yy</a>", ["qq"]),
        (CUT, [*SHORT, user("h|r")], ("user",), "<u>qq<a>aaaa</a><u>r", ["qq", "r"]),
        *(
            (OPENED, [user("qq"), assistant(said)], REPLIES, "<u>qq<a><think>\nh|yy</a>", ["h|yy</a>"])
            for said in ("<think>\nh|yy", "<think>h|yy", "h|yy")
        ),
        # nothing of the content is written
        (
            Template(content=lambda message, is_last: "[C]" if "tool_calls" in message else message["content"]),
            [user("qq"), assistant("I look", call("f"))],
            REPLIES,
            "<u>qq<a>[C]</a>",
            ["[C]</a>"],
        ),
        # it is written with other letters, and so it will be sampled
        (
            Template(content=lambda message, is_last: message["content"].upper()),
            SHORT,
            REPLIES,
            "<u>QQ<a>AAAA</a>",
            ["AAAA</a>"],
        ),
    ],
)
def test_the_last_reply_is_trained_on_as_the_policy_says_it(template, messages, train_on, text, learnt):
    assert find(template, messages, train_on) == (text, learnt)


def open_last(message: Any, is_last: bool) -> str:
    return "<a><e>" if is_last else "<a>"


def think(message: Any, is_last: bool) -> str:
    return f"<a><t>{message.get('reasoning', '').strip()}</t>" + ("\n" if is_last else "")


def forget(message: Any, is_last: bool) -> str:
    return f"<a><t>{message.get('reasoning', '')}</t>\n" if is_last else "<a><t></t>"


def strip_earlier(message: Any, is_last: bool) -> str:
    return message["content"] if is_last else message["content"].strip()


def call_last(message: Any, is_last: bool) -> str:
    return write_calls(message, is_last) if is_last else message["content"]


D: dict[str, Any] = {"header": open_last, "opens": "<a><e>"}
"""The header of the last reply is another than those of earlier ones."""
LAST = [user("r"), assistant("bbb")]
CALLED = [user("qq"), assistant("aaaa", call("f", "c1")), *LAST]
THOUGHTS = [
    *(user("qq"), assistant("aaaa", reasoning=" hm "), user("r"), assistant("bbb", reasoning="so")),
    *(user("s"), assistant("cc", reasoning="oh")),
]


@pytest.mark.parametrize(
    ("template", "messages", "text", "learnt"),
    [
        (Template(**D), LONG, "<u>qq<a>aaaa</a><u>r<a><e>bbb</a>", ["aaaa</a>", "bbb</a>"]),
        (Template(**D), LONG[1:], "<a>aaaa</a><u>r<a><e>bbb</a>", ["aaaa</a>", "bbb</a>"]),
        (
            Template(**D),
            [user("qq"), assistant(" aaaa"), *LAST],
            "<u>qq<a> aaaa</a><u>r<a><e>bbb</a>",
            [" aaaa</a>", "bbb</a>"],
        ),
        (
            Template(**D, content=strip_earlier),
            [user("qq"), assistant(" aaaa "), *LAST],
            "<u>qq<a>aaaa</a><u>r<a><e>bbb</a>",
            ["aaaa</a>", "bbb</a>"],
        ),
        (
            Template(**D, content=write_calls),
            CALLED,
            "<u>qq<a>aaaa[f]</a><u>r<a><e>bbb</a>",
            ["aaaa[f]</a>", "bbb</a>"],
        ),
        # the policy samples the thought, which stands between the header and the content
        (
            Template(header=think),
            THOUGHTS,
            "<u>qq<a><t>hm</t>aaaa</a><u>r<a><t>so</t>bbb</a><u>s<a><t>oh</t>\ncc</a>",
            ["<t>hm</t>aaaa</a>", "<t>so</t>bbb</a>", "<t>oh</t>\ncc</a>"],
        ),
        (
            Template(header=think),
            [*SHORT, *THOUGHTS[2:4]],
            "<u>qq<a><t></t>aaaa</a><u>r<a><t>so</t>\nbbb</a>",
            ["<t></t>aaaa</a>", "<t>so</t>\nbbb</a>"],
        ),
        # a template without a header of the next reply: the policy samples it
        (Template(opens=""), LONG, "<u>qq<a>aaaa</a><u>r<a>bbb</a>", ["<a>aaaa</a>", "<a>bbb</a>"]),
    ],
)
def test_an_earlier_reply_is_found_though_it_is_opened_in_another_way(template, messages, text, learnt):
    assert find(template, messages, REPLIES) == (text, learnt)


def count_last(messages: list[Any]) -> str:
    return str(len(messages[-1]["content"]))


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        (Template(content=lambda message, is_last: message["content"][: 9 if is_last else 2]), LONG, "a part"),
        (Template(**D, content=lambda message, is_last: message["content"][: 9 if is_last else 2]), LONG, "a part"),
        (Template(**D, content=call_last), CALLED, "a part"),
        (Template(content=CUT.content, first=count_last), [user("qq"), assistant("h|yy")], "a part"),
        (
            Template(header=lambda message, is_last: "<b>" if "name" in message else "<a>"),
            [user("qq"), {**assistant("aaaa"), "name": "x"}, *LAST],
            "the header",
        ),
        (Template(header=think, opens=""), THOUGHTS[:4], "the header"),
        (Template(header=forget), [user("hm?"), assistant("aaaa", reasoning="hm"), *LAST], "the reasoning"),
    ],
)
def test_a_reply_that_is_not_written_as_it_was_sampled_is_refused(template, messages, what):
    assert tell(lambda: find(template, messages, REPLIES), TemplateRewrites) == (
        f"the chat template rewrites earlier turns (it leaves out or changes {what} of a reply that other turns "
        "follow), so they cannot be trained on one by one: use a template that only appends, or data.train_on: "
        "last_reply"
    )


@pytest.mark.parametrize(
    "template",
    [
        Template(content=lambda message, is_last: message["content"] * 2),
        Template(first=lambda messages: str(len(messages[0]["content"]))),
        Template(content=lambda message, is_last: message["content"] + str(len(message["content"]))),
    ],
    ids=["twice", "before it", "after it"],
)
def test_a_question_that_is_written_by_its_content_is_refused(template):
    assert tell(lambda: find(template, SHORT, ("user",)), UserError) == (
        "the chat template writes a turn differently according to its content, so turns of user cannot be trained on: "
        "leave that role out of data.train_on"
    )


def test_a_begun_reply_that_the_template_leaves_out_follows_the_header():
    drops = Template(content=lambda message, is_last: "" if message["role"] == "assistant" else message["content"])
    assert write_begun_reply(drops, SHORT) == "<u>qq<a>aaaa"
    ends_otherwise = Template(**D)
    assert write_begun_reply(ends_otherwise, LONG) == "<u>qq<a>aaaa</a><u>r<a><e>bbb"
