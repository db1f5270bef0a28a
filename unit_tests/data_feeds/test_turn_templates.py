"""Ends of turns, and the text that follows a finished reply, under templates that write them in every way."""

from __future__ import annotations

from typing import Any

import pytest

from data_feeds.chat.template_append import TemplateRefuses, TemplateRewrites, write_answers
from data_feeds.chat.turn_ends import TurnEnd, find_turn_end
from unit_tests.helpers.chat_families import assistant, call, result, user
from unit_tests.helpers.sentences import tell
from unit_tests.helpers.written_turns import TOKENS, Template


def ends(earlier: str, last: str) -> Any:
    return lambda message, is_last: last if is_last else earlier


FIELDS = ("text", "written", "is_token", "closing", "ends", "n_after", "in_history")
FOUND: list[tuple[Template, tuple[str, ...], tuple[str, ...], tuple[Any, ...]]] = [
    # the template, the tokens, the stops, and the end
    (
        Template(end=ends("</a><h>", "</a><h>")),
        TOKENS,
        ("</s>",),
        ("<h>", "after", True, "</a><h>", ("<h>", "</s>"), 1, ""),
    ),
    (Template(end=ends("", "</s>")), TOKENS, ("</s>",), ("</s>", "after", True, "", ("</s>",), 1, "")),
    (
        Template(end=ends("", "</s>"), first=lambda messages: "<s>"),
        TOKENS,
        ("</s>",),
        ("</s>", "after", True, "", ("</s>",), 1, ""),
    ),
    (
        Template(end=ends("<h>\n", "</s>"), first=lambda messages: "<s>"),
        TOKENS,
        ("</s>",),
        ("</s>", "after", True, "<h>", ("</s>",), 1, "<h>"),
    ),
    # of the tokens after the last reply alone, one of the model's
    (
        Template(end=ends("", "<h></s><h>")),
        TOKENS,
        ("</t>", "</s>"),
        ("</s>", "after", True, "", ("</s>", "</t>"), 1, ""),
    ),
    (
        Template(end=ends("", "<h></a>")),
        TOKENS,
        ("</t>", "</s>"),
        ("<h>", "after", True, "", ("<h>", "</t>", "</s>"), 1, ""),
    ),
    (
        Template(end=ends("", ""), question=""),
        TOKENS,
        ("</t>", "</s>"),
        ("</t>", "never", True, "", ("</t>", "</s>"), 0, ""),
    ),
    (
        Template(end=ends("</a></s>", "</a></s></s>")),
        ("</a>",),
        ("</s>",),
        ("</a>", "after", True, "</a>", ("</a>", "</s>"), 3, ""),
    ),
    # a token whose text begins with another's, whatever the order of the tokens
    *(
        (
            Template(end=ends("</a>x", "</a>x")),
            tokens,
            ("</s>",),
            ("</a>x", "after", True, "</a>x", ("</a>x", "</s>"), 1, ""),
        )
        for tokens in (("</a>", "</a>x"), ("</a>x", "</a>"))
    ),
    # no token is known
    (
        Template(),
        (),
        ("</s>",),
        ("</a>", "after", False, "</a>", ("</a>", "</s>"), 1, ""),
    ),
    # the next turn begins with white space and a token
    (Template(end=ends(" ", "")), ("<u>",), ("</s>",), ("<u>", "next", True, "", ("<u>", "</s>"), 0, "")),
]


@pytest.mark.parametrize(("template", "tokens", "stops", "end"), FOUND)
def test_the_end_of_a_turn_is_found_in_every_template(template, tokens, stops, end):
    found = find_turn_end(template, tokens=tokens, stops=stops, named=None)
    assert found == TurnEnd(**dict(zip(FIELDS, end, strict=True)))


def test_a_template_that_refuses_every_question_ends_with_the_models_token():
    def refuse(messages: list[Any], reply_next: bool) -> str:
        raise TemplateRefuses("no")

    found = find_turn_end(refuse, tokens=TOKENS, stops=["</s>", "<h>"], named=None)
    assert (found.text, found.is_token, found.closing) == ("</s>", True, "</s>")
    assert (found.written, found.ends, found.n_after, found.in_history) == ("after", ("</s>", "<h>"), 1, "")


def test_a_named_end_may_be_a_stop_that_is_no_added_token():
    found = find_turn_end(Template(), tokens=(), stops=["</t>", "</s>"], named="</s>")
    assert (found.text, found.is_token, found.written, found.ends) == ("</s>", True, "never", ("</s>", "</t>"))
    assert (found.closing, found.n_after) == ("", 0)
    written = find_turn_end(Template(), tokens=TOKENS, stops=["</s>"], named="</a>")
    assert (written.text, written.written, written.closing) == ("</a>", "after", "</a>")
    opens = find_turn_end(Template(end=ends("\n", "")), tokens=TOKENS, stops=["</s>"], named="<u>")
    other = find_turn_end(Template(end=ends("\n", "")), tokens=TOKENS, stops=["</s>"], named="<h>")
    assert (opens.written, other.written) == ("next", "never")


def end_of(template: Any) -> TurnEnd:
    return find_turn_end(template, tokens=TOKENS, stops=("</s>", "<o>"), named=None)


def follow(template: Any, reply: Any, *answers: Any) -> str:
    return write_answers(template, end_of(template), reply, [*answers])


def write_calls(message: Any, is_last: bool) -> str:
    """Write the calls of a reply in place of its content."""
    return "[C]" if "tool_calls" in message else message["content"]


SAID, CALLED, WHY = assistant("x"), assistant("x", call("f", "c1")), user("why")
FOLLOWS: list[tuple[Template, Any, list[Any], str]] = [
    # the template, the reply, what follows it, and its text
    (Template(), SAID, [WHY], "<u>why<a>"),
    (Template(), SAID, [WHY, user("and")], "<u>why<u>and<a>"),
    # the end belongs to the next turn
    (Template(end=ends("\n", "")), SAID, [WHY], "\n<u>why<a>"),
    # the template writes none
    (Template(end=ends(" ", " "), question=""), SAID, [WHY], " why<a>"),
    # letters
    (Template(end=ends(" END ", " END "), question="U:"), SAID, [WHY], " U:why<a>"),
    # earlier replies end with another token
    (Template(end=ends("<h>", "</s>")), SAID, [WHY], "<u>why<a>"),
    # once at the end of all
    (Template(final="</s>"), SAID, [WHY], "<u>why<a>"),
    # calls without content
    (Template(content=write_calls), CALLED, [result("1", "c1")], "<o>1<a>"),
    # a thought that is written before the last reply alone
    (Template(header=lambda message, is_last: "<a><t>" if is_last else "<a>"), SAID, [WHY], "<u>why<a>"),
]


@pytest.mark.parametrize(("template", "reply", "answers", "text"), FOLLOWS)
def test_what_follows_a_reply_begins_after_its_end(template, reply, answers, text):
    assert follow(template, reply, *answers) == text


BEGINNING = (
    "the chat template rewrites earlier turns (a conversation's beginning is not the beginning of its continuation), "
    "so nothing can follow the tokens of a reply: use a template that only appends"
)
REPLY = (
    "the chat template writes a reply differently once it is answered, so nothing can follow its tokens: use a "
    "template that only appends"
)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (Template(first=lambda messages: str(len(messages))), BEGINNING),
        (Template(first=lambda messages: "x" if len(messages) > 2 else ""), BEGINNING),
        (
            Template(
                content=lambda message, is_last: message["content"] if is_last or message["role"] == "user" else "-"
            ),
            REPLY,
        ),
    ],
    ids=["from the first reply on", "from the first answer on", "the reply"],
)
def test_a_template_that_changes_what_was_written_is_refused(template, sentence):
    assert tell(lambda: follow(template, SAID, WHY), TemplateRewrites) == sentence


def look_up(messages: list[Any], reply_next: bool) -> str:
    """Write a result with the name of the call that it answers."""
    calls = {one["id"]: one["function"]["name"] for m in messages for one in m.get("tool_calls", [])}

    def write_content(message: Any, is_last: bool) -> str:
        if message["role"] != "tool":
            return message["content"]
        if message["tool_call_id"] not in calls:
            raise TemplateRefuses(f"nobody called {message['tool_call_id']}")
        return f"{calls[message['tool_call_id']]}={message['content']}"

    return Template(content=write_content)(messages, reply_next)


def take_one(messages: list[Any], reply_next: bool) -> str:
    if any(len(message.get("tool_calls", [])) > 1 for message in messages):
        raise TemplateRefuses("one call at once")
    return look_up(messages, reply_next)


def test_results_are_written_beside_the_calls_that_they_answer():
    two = assistant("x", call("f", "c1"), call("g", "c2"))
    assert follow(look_up, two, result("2", "c2"), result("1", "c1")) == "<o>g=2<o>f=1<a>"
    # a template of one call gets the first, and then a call for each result
    assert follow(take_one, two, result("1", "c1")) == "<o>f=1<a>"
    assert follow(take_one, two, {**result("2", "c2"), "name": "g"}) == "<o>g=2<a>"
    # the call of a result could not be read
    assert follow(look_up, SAID, {**result("3", "c7"), "name": "h"}, user("and")) == "<o>h=3<u>and<a>"


def test_the_last_refusal_of_the_answers_is_told():
    two = assistant("x", call("f", "c1"), call("g", "c2"))
    results = [{**result(n, f"c{n}"), "name": "f"} for n in ("1", "2")]
    assert tell(lambda: follow(take_one, two, *results), TemplateRefuses) == "one call at once"
    lone = {**result("3", "c7"), "role": "user"}

    def refuse(messages: list[Any], reply_next: bool) -> str:
        if any("tool_call_id" in message for message in messages):
            raise TemplateRefuses(f"{len(messages)} turns")
        return Template()(messages, reply_next)

    assert tell(lambda: follow(refuse, SAID, WHY, lone), TemplateRefuses) == "4 turns"
