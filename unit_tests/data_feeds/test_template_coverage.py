"""Fields of messages under the names of a template, and those that it leaves out, each of which is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.types.images import EncodedImage
from data_feeds.chat.template_coverage import TemplateCoverage
from data_feeds.chat.template_messages import count_characters, find_reasoning_name, list_parts, to_template_messages
from data_feeds.chat.tokenizer import ChatTokenizer
from unit_tests.helpers.chat_families import WEATHER, assistant, call, result, user
from unit_tests.helpers.sentences import tell

IMAGE = EncodedImage(data=b"", width=3, height=2, hash="h")
PARTS: list[Any] = [{"type": "text", "text": "a"}, {"type": "image", "image": IMAGE}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ m.reasoning_content }}", "reasoning_content"),
        ("{{ m.thinking }}{{ m.reasoning }}", "reasoning"),
        ("{{ m.thinking }}{{ m.reasoning }}{{ m['reasoning_content'] }}", "reasoning_content"),
        ("{{ m['thinking'] }}", "thinking"),
        ("{{ enable_thinking }}{{ m.reasoning_contents }}{{ unreasoning }}", None),
        ("", None),
    ],
)
def test_reasoning_has_the_name_that_the_template_reads(template, name):
    assert find_reasoning_name(template) == name


def test_messages_have_the_fields_of_the_template():
    plain: list[Any] = [user("q"), assistant("a", call("f"))]
    assert to_template_messages(plain, "{{ m.thinking }}") is plain
    thought: list[Any] = [user("q"), {**assistant("a", call("f"), reasoning="hm"), "train": False, "name": "x"}]
    given = json.dumps(thought)
    fields = {"role": "assistant", "content": "a", "tool_calls": [call("f")], "name": "x"}
    assert to_template_messages(thought, "{{ m.thinking }}") == [user("q"), fields | {"thinking": "hm"}]
    assert to_template_messages(thought, "{{ m.content }}") == [user("q"), fields]
    assert json.dumps(thought) == given, "they are not changed"
    empty: list[Any] = [{**assistant("a"), "reasoning": ""}]
    assert to_template_messages(empty, "{{ m.thinking }}") == [{**assistant("a"), "thinking": ""}]
    flagged: list[Any] = [user("q") | {"train": True}, assistant("a")]
    assert to_template_messages(flagged, "") == [user("q"), assistant("a")]


def test_content_is_parts_where_the_template_reads_them():
    shown = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    seen: list[Any] = [{**user("ab"), "parts": PARTS}, assistant("c")]
    assert to_template_messages(seen, "") == [{"role": "user", "content": shown}, assistant("c")]
    said = {"role": "assistant", "content": [{"type": "text", "text": "c"}]}
    assert to_template_messages(seen, "", {"assistant"}) == [{"role": "user", "content": shown}, said]
    assert to_template_messages(seen[1:], "", {"assistant"}) == [said]
    assert to_template_messages(seen[1:], "", {"user"}) == seen[1:]
    assert list_parts(seen[0]) == shown and list_parts(user("x")) == [{"type": "text", "text": "x"}]


def test_the_characters_of_a_conversation_are_those_of_all_its_fields():
    called = assistant("abc", call("f"), reasoning="de")
    calls = len(str([call("f")]))
    assert count_characters([user("q"), called]) == 1 + 3 + 2 + calls
    assert count_characters([user("q")], [WEATHER, {"a": 1}]) == 1 + len(str(WEATHER)) + 8


@pytest.fixture(scope="module")
def chat(tiny_path: str) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


TOOLS = "{{ tools or '' }}"
PARTS_OF_A_TURN = {
    "name": "{{ m.name or '' }}",
    "reasoning": "{{ m.reasoning or '' }}",
    "content": "{{ m.content }}",
    "calls": "{% for c in m.tool_calls or [] %}{{ '<' + c.function.name + '>' }}{% endfor %}",
    "id": "{{ m.tool_call_id or '' }}",
}


def write(*, tools: str = TOOLS, **parts: str) -> str:
    """Return a template that writes every field, but for parts that are written in another way."""
    turn = ":".join((PARTS_OF_A_TURN | parts).values())
    return tools + "{% for m in messages %}{{ m.role }}:" + turn + ";{% endfor %}"


def write_first(n: int) -> str:
    return PARTS_OF_A_TURN["calls"].replace("m.tool_calls or []", f"(m.tool_calls or [])[:{n}]")


def cover(chat: ChatTokenizer, template: str) -> TemplateCoverage:
    chat.hf.chat_template = template
    return TemplateCoverage(chat)


A, B, C = call("f", "a"), call("g", "b"), call("h", "c")
EVERYTHING: list[Any] = [
    {"role": "system", "content": "s", "name": "Ann"},
    user("q"),
    assistant("I look", A, B, C, reasoning="hm"),
    *(result("1", "c"), result("2", "a"), {**result("3", "b"), "name": "other"}),
    assistant("x"),
]
SAID: Any = {"role": "assistant", "content": "x"}


def test_a_template_that_writes_every_field_is_right(chat):
    cover(chat, write()).check(EVERYTHING, [WEATHER], "row 3")


LEFT_OUT: list[tuple[str, list[Any], str, str]] = [
    # the template, messages, what it leaves out, and the fix
    (write(tools=""), [user("q")], "the tools", "remove the column tools, or the tools of rollout.env"),
    (write(calls=""), [user("q"), assistant("x", A)], "tool_calls", "leave such rows out"),
    *(
        (
            write(calls=write_first(n)),
            [user("q"), assistant("x", A, B, C)],
            f"call {n + 1} of 3 of one reply",
            "leave such rows out",
        )
        for n in (1, 2)
    ),
    (
        write(content="{{ m.content if not m.tool_calls }}"),
        [user("q"), assistant("x", A)],
        "the content of a turn that has tool_calls",
        "empty that content",
    ),
    (
        write(reasoning=""),
        [user("q"), assistant("x", reasoning="hm")],
        "reasoning",
        "remove it, or write it into the content",
    ),
    (write(name=""), [user("q") | {"name": "Ann"}], "the name of a message", "remove it, or write it into the content"),
    (
        write(name=""),
        [user("q"), assistant("x", A), {**result("1", "a"), "name": "g"}],
        "the name of a message",
        "remove it, or write it into the content",
    ),
    (
        write(name=""),
        [user("q"), assistant("x", A), SAID | {"name": "f"}],
        "the name of a message",
        "remove it, or write it into the content",
    ),
    *(
        (
            write(id=""),
            [user("q"), assistant("x", A, B, C), *(result("1", one) for one in order)],
            "tool_call_id",
            "bring results into the order of their calls",
        )
        for order in ("b", "ac", "cab")
    ),
]


@pytest.mark.parametrize(("template", "messages", "what", "fix"), LEFT_OUT)
def test_a_field_that_is_left_out_is_told_with_the_fix(chat, template, messages, what, fix):
    assert tell(lambda: cover(chat, template).check(messages, [WEATHER], "row 3")) == (
        f"row 3: the chat template leaves out {what}: use a model or a template that writes it, or {fix}"
    )


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (write(tools=""), [user("q")]),
        (write(calls=write_first(1)), [user("q"), assistant("x", A)]),
        (write(content="{{ m.content if not m.tool_calls }}"), [user("q"), assistant(" ", A)]),
        (write(name=""), [user("q"), assistant("x", A), {**result("1", "a"), "name": "f"}]),
        (write(id=""), [user("q"), assistant("x", A, B, C), *(result("1", one) for one in "abc")]),
        (
            write(id=""),
            [*(user("q"), assistant("x", A, B), result("1", "a")), *(assistant("x", C), result("1", "c"))],
        ),
        (write(id=""), [user("q"), assistant("x", B), result("1", "b"), assistant("x", A, C), result("1", "b")]),
        # without the field it would refuse the row
        (
            write(id="{% if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('whose?') }}{% endif %}"),
            [user("q"), assistant("x", A, B), result("1", "b")],
        ),
    ],
)
def test_what_says_nothing_more_may_be_left_out(chat, template, messages):
    cover(chat, template).check(messages, [], "row 3")


def test_plain_text_leaves_out_tools(tiny_path):
    plain = TemplateCoverage(ChatTokenizer(tiny_path, "plain"))
    assert tell(lambda: plain.check([user("q")], [WEATHER], "row 3")) == (
        "row 3: data.template=plain leaves out the tools: use data.template=chat, or remove the column tools, or the "
        "tools of rollout.env"
    )


def unless(wrong: str, part: str) -> dict[str, str]:
    """Return the part of a turn that is left out where `wrong`."""
    return {part: "{% if not (" + wrong + ") %}" + PARTS_OF_A_TURN[part] + "{% endif %}"}


THOUGHT: Any = assistant("x", reasoning="hm")
NAMED: Any = {"name": "Ann"}
SHAPES: list[tuple[str, list[Any], list[Any], str]] = [
    # the template, messages of which it writes everything, and others of which it leaves something out
    (
        write(**unless("m.role == 'user'", "name")),
        [{"role": "system", "content": "s"} | NAMED],
        [user("q") | NAMED],
        "the name",
    ),
    (
        write(**unless("loop.previtem and loop.previtem.role == 'tool'", "reasoning")),
        [user("q"), THOUGHT],
        [user("q"), assistant("x", A), result("1", "a"), THOUGHT],
        "reasoning",
    ),
    (
        write(**unless("m.tool_calls and m.tool_calls | length > 1", "reasoning")),
        [user("q"), assistant("x", A, reasoning="hm")],
        [user("q"), assistant("x", A, B, reasoning="hm")],
        "reasoning",
    ),
    (
        write(**unless("not m.content.strip()", "reasoning")),
        [user("q"), assistant("x", A, reasoning="hm")],
        [user("q"), assistant(" ", A, reasoning="hm")],
        "reasoning",
    ),
    (
        write(**unless("m.reasoning", "name")),
        [user("q"), SAID | NAMED],
        [user("q"), THOUGHT | NAMED],
        "the name",
    ),
    (
        write(**unless("m.name", "reasoning")),
        [user("q"), THOUGHT],
        [user("q"), THOUGHT | NAMED],
        "reasoning",
    ),
    (
        write(**unless("m.tool_call_id", "name")),
        [user("q"), assistant("x", A), {"role": "tool", "content": "1", "name": "z"}],
        [user("q"), assistant("x", A), result("1", "a") | {"name": "z"}],
        "the name",
    ),
]


@pytest.mark.parametrize(("template", "first", "second", "what"), SHAPES)
def test_rows_of_another_shape_are_looked_at_too(chat, template, first, second, what):
    coverage = cover(chat, template)
    coverage.check(first, [], "row 0")
    assert f"row 1: the chat template leaves out {what}" in tell(lambda: coverage.check(second, [], "row 1"))


def test_rows_with_tools_are_looked_at_beside_rows_without(chat):
    coverage = cover(chat, write(**unless("tools", "reasoning")))
    coverage.check([user("q"), THOUGHT], [], "row 0")
    assert "leaves out reasoning" in tell(lambda: coverage.check([user("q"), THOUGHT], [WEATHER], "row 1"))
    coverage = cover(chat, write(tools="{{ tools or '' if messages[0].role == 'system' }}"))
    coverage.check([{"role": "system", "content": "s"}, user("q")], [WEATHER], "row 0")
    assert "leaves out the tools" in tell(lambda: coverage.check([user("q")], [WEATHER], "row 1"))


DROPS_SYSTEM = write(content="{{ m.content if m.role != 'system' }}")
CONTENT: list[tuple[list[Any], str, set[int], str]] = [
    # messages, their text, the trained turns, and what is missing
    ([user("one two")], "one", set(), "a part of what a turn of user holds (one two)"),
    (
        [user("q"), assistant("<think>hm</think>yes")],
        "q yes",
        {1},
        "a part of what a turn of assistant holds (<think>hm</think>yes)",
    ),
    ([user("q"), assistant("<think>hm</think>yes")], "q <think>hm</think>", set(), "holds (yes)"),
    ([user("q"), assistant("yes", reasoning="hm")], "q yes", {1}, "a part of what a turn of assistant holds (hm)"),
    ([user("q"), assistant("yes"), assistant("no")], "q yes", {2}, "a part of what a turn of assistant holds (no)"),
    ([user("ab") | {"parts": PARTS}], "a", set(), "a part of what a turn of user holds (b)"),
    ([user("<think>x</think>y")], "y", set(), "a part of what a turn of user holds (<think>x</think>y)"),
]


@pytest.mark.parametrize(("messages", "text", "trained", "what"), CONTENT)
def test_text_that_is_missing_is_told_by_its_turn(chat, messages, text, trained, what):
    coverage = cover(chat, write())
    said = tell(lambda: coverage.check_content(messages, [], text, trained, "row 3"))
    assert said.startswith("row 3: the chat template leaves out a part of what a turn of ") and f"{what}: use" in said
    assert said.endswith(", or remove it")


@pytest.mark.parametrize(
    ("messages", "text", "trained"),
    [
        ([user(" one two\n")], "one two", set()),
        ([user("one\n two")], "one two", set()),
        ([user('say "é"')], 'say \\"é\\"', set()),
        ([user("q"), assistant("<think>hm</think>yes")], "q yes", {0}),
        ([user("q"), assistant("yes", reasoning="hm")], "q yes", set()),
        ([user("q"), assistant("<think>hm</think>yes", reasoning="so")], "q so <think>hm</think>yes", {1}),
        ([user("ab") | {"parts": PARTS}], "a b", set()),
        ([user(" "), assistant("", A)], "", {1}),
    ],
)
def test_text_counts_however_it_is_spaced_or_escaped(chat, messages, text, trained):
    cover(chat, write()).check_content(messages, [], text, trained, "row 3")


def test_a_short_text_that_stands_elsewhere_is_no_proof(chat):
    messages: list[Any] = [{"role": "system", "content": "q"}, user("q")]
    coverage = cover(chat, DROPS_SYSTEM)
    assert tell(lambda: coverage.check_content(messages, [], "q", set(), "row 3")) == (
        "row 3: the chat template leaves out the content of a turn of system: use a model or a template that writes "
        "it, or remove it"
    )
    blank: list[Any] = [{"role": "system", "content": " "}, *messages[1:]]
    cover(chat, DROPS_SYSTEM).check_content(blank, [], "q", set(), "row 3")
    refuses = "{% if messages[0].content != 'q' %}{{ raise_exception('no') }}{% endif %}" + DROPS_SYSTEM
    cover(chat, refuses).check_content(messages, [], "q", set(), "row 3")
