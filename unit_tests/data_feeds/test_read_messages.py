"""Messages of a row to the letter: what each is read as, and the sentence of each that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.read_messages import read_messages

ASKED = {"role": "user", "content": "1+1="}


def call(**more: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": {}}, **more}


def says(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "2", **more}


def shows(**part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


def test_everything_in_a_conversation_is_read():
    made = [
        call(id="a", type="function"),
        {"function": {"name": "g", "arguments": '{"x": [1]}'}},
        {"function": {"name": "g", "arguments": {"x": None}}, "id": None},
    ]
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        ASKED | {"name": "Ann", "train": None, "weight": None},
        says(content=None, tool_calls=made, reasoning="hm", reasoning_content="hm", weight=0),
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "g"},
        says(tool_calls=[call()], train=True, weight=1.0, reasoning="", reasoning_content="so"),
        says(tool_calls=[], train=False),
    ]

    def read_call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [read_call("a", "f"), read_call("call00001", "g", x=[1]), read_call("call00002", "g", x=None)]
    assert read_messages(turns, "messages", fills_gaps=False) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1=", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning": "hm", "train": False},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "g"},
        # numbered over the whole conversation, so that the ids are unique
        {**says(reasoning="so", train=True), "tool_calls": [read_call("call00003", "f")]},
        says(train=False),
    ]


@pytest.mark.parametrize(
    ("part", "image"),
    [
        ({"type": "image"}, {}),
        ({"type": "image", "image": "a.png", "text": None, "url": None}, {"image": "a.png"}),
        ({"type": "image_url", "image_url": {"url": "data:x"}}, {"image": "data:x"}),
        ({"type": "image_url", "image_url": "b.png"}, {"image": "b.png"}),
        ({"type": "image", "image": {"bytes": b"x", "path": None}}, {"image": {"bytes": b"x", "path": None}}),
        ({"type": "image", "path": "c.png"}, {"image": "c.png"}),
    ],
)
def test_an_image_is_what_the_row_has_in_its_place(part, image):
    [message] = read_messages(shows(**part), "messages", fills_gaps=False)
    assert message == {"role": "user", "content": "", "parts": [{"type": "image", **image}]}
    around = [{"type": "text", "text": "a"}, part, {"type": "text", "text": "b", "image": None}]
    [message] = read_messages([{"role": "user", "content": around}], "messages", fills_gaps=False)
    parts = [{"type": "text", "text": "a"}, {"type": "image", **image}, {"type": "text", "text": "b"}]
    assert message == {"role": "user", "content": "ab", "parts": parts}


ROLES = "system, developer, user, assistant, tool"
NO_LIST = "prompt must be text or a list of {role, content} texts, found "
NO_CALL = "a call must be {id, type, function: {name, arguments}}, found "
REFUSED: list[tuple[Any, str]] = [
    (5, f"{NO_LIST}5"),
    ([], f"{NO_LIST}[]"),
    ([ASKED, "x"], f"{NO_LIST}[{ASKED}, 'x']"[: len(NO_LIST) + 60]),
    ([{"role": 3, "content": "x"}], NO_LIST + "[{'role': 3, 'content': 'x'}]"),
    ([{"role": "user"}], NO_LIST + "[{'role': 'user'}]"),
    ([{"role": "user", "content": 3}], NO_LIST + "[{'role': 'user', 'content': 3}]"),
    ([{"role": "assistant", "tool_calls": []}], NO_LIST + "[{'role': 'assistant', 'tool_calls': []}]"),
    (
        [ASKED | {"z": 1, "mood": 0}],
        "a message holds 'mood', which is not passed to the template: remove it, or write it into the content",
    ),
    (
        [ASKED | {"role": "x"}],
        f"a message has the role 'x', which is none of {ROLES}: rename it (form: sharegpt of the source renames those "
        "of ShareGPT)",
    ),
    ([says(content=[{"type": "image"}])], "a turn of assistant holds an image, and the policy writes text alone"),
    ([says(tool_calls="f()")], "tool_calls must be a list of calls, found 'f()'"),
    ([says(reasoning="a", reasoning_content="b")], "a message has reasoning and reasoning_content, and they differ"),
    *(
        ([{**ASKED, field: value}], f"{field} belongs to a turn of {role}, found it in a turn of user")
        for field, value, role in (
            ("tool_calls", [call()], "assistant"),
            ("reasoning", "x", "assistant"),
            ("tool_call_id", "x", "tool"),
        )
    ),
    *(
        ([says(**{name: value})], f"{name} of a message must be true, false, 1 or 0, found {value!r}")
        for name, value in (("train", 2), ("weight", "1"), ("weight", 0.5), ("train", []))
    ),
    ([says(train=True, weight=0)], "a message has train and weight, and they differ"),
    *(([says(**{name: 3})], f"{name} of a message must be text, found 3") for name in ("name", "reasoning_content")),
    (shows(type="video"), "a message holds a part of the type video, and only text and images can be read"),
    (shows(type="image", max_pixels=3, a=0), "an image holds 'a', which is not read: remove it"),
    (
        shows(type="image", text="1"),
        "a part of a content must be text or an image, found {'type': 'image', 'text': '1'}",
    ),
    *(
        (shows(**part), f"a part of a content must be {{type: text, text}}, found {part}")
        for part in (
            {"type": "text"},
            {"type": 3, "text": "x"},
            {"type": "text", "text": "x", "url": "y"},
            {"text": "x"},
        )
    ),
    ([{"role": "user", "content": ["x"]}], "a part of a content must be {type: text, text}, found 'x'"),
    (shows(type="image", url="a", path="b"), "a part has several images: path, url"),
    *(([says(tool_calls=[one])], f"{NO_CALL}{one!r}") for one in ("f", {}, {"function": {"name": ""}})),
    (
        [says(tool_calls=[call(type="code")])],
        "a call has the type 'code', and only function can be read",
    ),
    ([says(tool_calls=[call(id=3)])], "id of a call must be text, found 3"),
    *(
        (
            [says(tool_calls=[{"function": {"name": "f", "arguments": arguments}}])],
            f"arguments of a call of f must be a JSON object, found {arguments!r}",
        )
        for arguments in ("x", "[1]", 3, None)
    ),
    ([says(tool_calls=[call(id="a"), call(id="a")])], "two calls of one reply have the same id"),
    (
        [{"role": "tool", "content": "", "tool_call_id": "b"}, says(tool_calls=[call(id="b")])],
        "a result answers the call 'b', which no turn before made",
    ),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[sentence[:70] for _, sentence in REFUSED])
def test_messages_that_cannot_be_read_are_told_in_one_sentence(given, sentence):
    with pytest.raises(InvalidRow) as refused:
        read_messages(given, "prompt", fills_gaps=False)
    assert str(refused.value) == sentence
    of_images = ("a turn of assistant holds", "an image holds", "a part has several")
    assert refused.value.reason == ("bad_image" if sentence.startswith(of_images) else "bad_messages")


def test_a_null_argument_is_refused_where_the_file_writes_nulls_itself():
    turns = [says(tool_calls=[{"function": {"name": "f", "arguments": {"x": [{"y": None}]}}}])]
    with pytest.raises(InvalidRow) as refused:
        read_messages(turns, "messages", fills_gaps=True)
    assert str(refused.value) == (
        "the arguments of a call of f hold null, and this kind of file writes null for every argument that another "
        "call has: write arguments as JSON text"
    )
    as_text = [says(tool_calls=[{"function": {"name": "f", "arguments": '{"x": null}'}}])]
    [message] = read_messages(as_text, "messages", fills_gaps=True)
    assert message.get("tool_calls", [])[0]["function"]["arguments"] == {"x": None}
