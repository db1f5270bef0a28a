"""Rows of other forms in our columns, to the letter, and the sentences of those that cannot be converted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data_feeds.chat.tool_specs import FORM, find_misfit, read_tools
from data_feeds.rows.convert_form import convert_row
from data_feeds.rows.find_form import find_form
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.values import find_value, parse_list, parse_turns, to_text


def convert(row: dict[str, Any], like: dict[str, Any] | None = None, kind: Any = "conversations") -> dict[str, Any]:
    """Convert a row of the form of another, or of its own."""
    return convert_row(find_form(kind, [like or row], key="data.train=x", path="x"), row)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
CALL = {"from": "function_call", "value": '[{"name": "f", "arguments": {"x": null}}, {"name": "g"}]'}
SEEN = {"from": "observation", "value": "1"}
ALPACA = {"instruction": "i", "output": "a"}
SHARED = {"conversations": [HUMAN, GPT]}


def make_call(n: int, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, "id": f"call{n:05d}"}


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # a row, and what it becomes; columns that the form does not read stay
    (ALPACA | {"input": "x", "id": 3}, {"messages": [user("i\nx"), says("a")], "id": 3}),
    (ALPACA | {"input": "", "system": ""}, {"messages": [user("i"), says("a")]}),
    (
        ALPACA | {"system": "s", "history": [["q", "r"], ["q2", "r2"]]},
        {"messages": [system("s"), user("q"), says("r"), user("q2"), says("r2"), user("i"), says("a")]},
    ),
    (ALPACA | {"history": '[["q", "r"]]'}, {"messages": [user("q"), says("r"), user("i"), says("a")]}),
    (SHARED | {"system": "s"}, {"messages": [system("s"), user("q"), says("a")]}),
    (
        {"conversations": [{"from": "system", "value": "s"}, HUMAN, GPT], "system": "s"},
        {"messages": [system("s"), user("q"), says("a")]},
    ),
    (
        {"conversations": [HUMAN, GPT | {"weight": 0, "x": None}]},
        {"messages": [user("q"), says("a", weight=0)]},
    ),
    (
        {"conversations": [HUMAN, CALL, SEEN, SEEN, SEEN, CALL, GPT]},
        {
            "messages": [
                user("q"),
                says(None, tool_calls=[make_call(0, "f", '{"x": null}'), make_call(1, "g", "{}")]),
                {"role": "tool", "content": "1", "tool_call_id": "call00000"},
                {"role": "tool", "content": "1", "tool_call_id": "call00001"},
                {"role": "tool", "content": "1"},
                says(None, tool_calls=[make_call(2, "f", '{"x": null}'), make_call(3, "g", "{}")]),
                says("a"),
            ]
        },
    ),
    ({"texts": [{"user": "q", "assistant": "a", "source": "x"}]}, {"messages": [user("q"), says("a")]}),
    ({"segments": [{"label": False, "text": "q"}]}, {"messages": [user("q") | {"train": False}]}),
    ({"prompt": "q", "completion": [says("a")]}, {"messages": [user("q"), says("a")]}),
    ({"prompt": json.dumps([user("q")]), "completion": "a"}, {"messages": [user("q"), says("a")]}),
    ({"prompt": json.dumps([HUMAN]), "completion": "a"}, {"messages": [user("q"), says("a")]}),
    ({"text": "all of it"}, {"messages": "all of it"}),
    (
        SHARED | {"tools": json.dumps([{"name": "f"}])},
        {
            "messages": [user("q"), says("a")],
            "tools": json.dumps(
                [{"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, "name": "f"}}]
            ),
        },
    ),
    (SHARED | {"tools": ""}, {"messages": [user("q"), says("a")], "tools": None}),
    (SHARED | {"tools": "[]"}, {"messages": [user("q"), says("a")], "tools": None}),
    (SHARED | {"tools": "[3]"}, {"messages": [user("q"), says("a")], "tools": "[3]"}),
    # images: by marks, or all of them before the first question
    (
        {"conversations": [{"from": "human", "value": "a<image>b<image>"}, GPT], "images": ["1", "2"]},
        {
            "messages": [
                user(
                    [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
                ),
                says("a"),
            ],
            "images": ["1", "2"],
        },
    ),
    (
        SHARED | {"image": "1"},
        {"messages": [user([{"type": "image"}, {"type": "text", "text": "q"}]), says("a")], "image": "1"},
    ),
    (
        SHARED | {"image": {"bytes": None, "path": None}},
        {"messages": [user("q"), says("a")]} | {"image": {"bytes": None, "path": None}},
    ),
    (
        {"messages": "<image>q", "images": '["1"]', "x": 1},
        {"messages": [user([{"type": "image"}, {"type": "text", "text": "q"}])], "images": '["1"]', "x": 1},
    ),
    (
        {
            "messages": [user([{"type": "image", "index": 0}, {"type": "text", "text": "q"}]), says("a")],
            "images": ["1"],
        },
        {"messages": [user([{"type": "image"}, {"type": "text", "text": "q"}]), says("a")], "images": ["1"]},
    ),
]


@pytest.mark.parametrize(("row", "made"), CASES, ids=[str(n) for n in range(len(CASES))])
def test_a_row_of_another_form_becomes_our_columns(row, made):
    assert convert(row) == made


def test_replies_of_a_pair_that_begin_with_the_prompt_lose_it():
    made = convert({"prompt": "q", "chosen": "qa", "rejected": "qb"}, kind="pairs")
    assert made == {"messages": "q", "chosen": "a", "rejected": "b"}
    made = convert({"prompt": "q", "chosen": "a", "rejected": "b"}, kind="pairs")
    assert made == {"messages": "q", "chosen": "a", "rejected": "b"}


ROLES = (
    "human, user, gpt, chatgpt, assistant, model, bot, bing, bard, function_call, observation, tool, function, "
    "function_response, system, developer"
)
NO_TURNS = "conversations must be text or a list of turns, found "
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # the row by which the form is found, one of the same form that is broken, and the sentence
    *(
        (SHARED, SHARED | {name: "x"}, f"it has {name}, which are not read, and its messages may need them")
        for name in ("video", "videos", "audio", "audios")
    ),
    (
        SHARED | {"system": "s"},
        {"conversations": [{"from": "system", "value": "t"}, HUMAN], "system": "s"},
        "system and conversations hold different system turns",
    ),
    (SHARED, {"conversations": 5}, f"{NO_TURNS}5"),
    (SHARED, {"conversations": [HUMAN, 5]}, f"{NO_TURNS}{[HUMAN, 5]}"),
    (
        SHARED,
        {"conversations": [{"from": "alien", "value": "x"}]},
        f"a turn of conversations is from alien, which is none of {ROLES}",
    ),
    (
        SHARED,
        {"conversations": [{"from": "function_call", "value": "f()"}]},
        "a function_call of conversations must be JSON of {name, arguments}, found 'f()'",
    ),
    (
        ALPACA | {"history": [["q", "r"]]},
        ALPACA | {"history": [["q"]]},
        "history must be a list of [question, reply], found [['q']]",
    ),
    (
        {"prompt": "q", "completion": "a"},
        {"prompt": '[{"role": "user"', "completion": "a"},
        "prompt begins as turns and is no JSON: Expecting ':' delimiter: line 1 column 17 (char 16)",
    ),
    (
        SHARED,
        {"conversations": [{"from": "human", "value": "<image>"}], "images": ["1", "2"]},
        "it has 2 images, and 1 marks <image> in messages: write one for each",
    ),
    (
        SHARED,
        {"conversations": [user([{"type": "image", "index": 1}])], "images": ["1", "2"]},
        "the parts of messages are of the images [1]: write them in order, from 0 on",
    ),
]


@pytest.mark.parametrize(("like", "row", "sentence"), REFUSED, ids=[sentence[:60] for *_, sentence in REFUSED])
def test_a_row_that_cannot_be_converted_is_told_in_one_sentence(like, row, sentence):
    with pytest.raises(InvalidRow) as refused:
        convert(row, like)
    if "is no JSON" in sentence:
        assert str(refused.value).startswith(sentence.partition(": Exp")[0])
    else:
        assert str(refused.value) == sentence


def spec(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **function}}


NOT_OBJECT = "parameters of the tool f must be a JSON schema of the type object, found "
TOOLS: list[tuple[Any, str]] = [
    ("[", "tools is text and no JSON: Expecting value: line 1 column 2 (char 1)"),
    (3, f"tools must be a list of {FORM}, found 3"),
    ([3], f"a tool must be {FORM}, found 3"),
    ([spec() | {"type": "x"}], f"a tool must be {FORM}, found {spec() | {'type': 'x'}!r:.60}"),
    ([{"type": "function", "function": {"name": " "}}], "a tool has no name, found {'name': ' '}"),
    ([spec(description=3)], "the description of the tool f must be text, found 3"),
    ([spec(parameters=None)], f"{NOT_OBJECT}None"),
    ([spec(parameters={"type": "array"})], NOT_OBJECT + "{'type': 'array'}"),
    (
        [spec(parameters={"type": "object", "properties": {"x": {"type": "int"}}})],
        "parameters of the tool f are no JSON schema: 'int' is not valid under any of the given schemas",
    ),
    ([spec(), spec()], "two tools are called 'f'"),
]


def test_tools_are_read_or_named():
    tools = [spec(), spec(name="g", description="d")]
    assert read_tools(tools, fills_gaps=True) == read_tools(json.dumps(tools), fills_gaps=True) == tools
    assert read_tools(None, fills_gaps=False) == []
    nulls = [spec(parameters={"type": "object", "default": None})]
    assert read_tools(nulls, fills_gaps=False) == read_tools(json.dumps(nulls), fills_gaps=True) == nulls
    gap = "tools hold null, and this kind of file writes null for every key that another tool has"
    gap += ": write tools as JSON text"
    for given, sentence, fills in [*((*case, False) for case in TOOLS), (nulls, gap, True)]:
        with pytest.raises(InvalidRow) as refused:
            read_tools(given, fills_gaps=fills)
        assert (str(refused.value), refused.value.reason) == (sentence, "bad_tools")


def test_a_call_that_does_not_fit_is_told_why():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tools: list[Any] = [spec(parameters=schema), {"type": "function", "function": {"name": "g"}}]

    def tell(name: str, arguments: Any, known: list[Any] = tools) -> str:
        return find_misfit({"name": name, "arguments": arguments}, known)

    assert tell("f", {"x": 1, "y": 2}) == tell("g", {"z": 1}) == ""
    assert tell("h", {}) == "There is no function h; there are f, g."
    assert tell("h", {}, tools[:1]) == "There is no function h; there is f."
    assert tell("h", {}, []) == "There is no function h; there is none."
    nan = "The arguments of f hold a number or a depth that JSON does not have."
    assert tell("f", {"x": float("nan")}) == nan
    assert tell("f", {"x": "\ud800"}) == "The arguments of f hold half of a character."
    assert tell("f", {}) == "The arguments of f do not fit its schema: 'x' is a required property."
    assert tell("f", {"x": "1"}) == "The arguments of f do not fit its schema: x: '1' is not of type 'integer'."
    lost = [spec(parameters={"type": "object", "$ref": "http://nowhere/x"})]
    assert tell("f", {}, lost).startswith("The arguments of f do not fit its schema: it cannot be checked (")


def test_values_of_a_row_are_found_and_read():
    row = {"a": {"b": [{"c": 1}, None]}, "a.d": 2, "e": "x"}
    found = [find_value(row, path) for path in ("a.b.0.c", "a.b.2", "a.d", "e.f", "a.x.y", "z", "a.b.x")]
    assert found == [1, None, 2, None, None, None, None]
    assert [parse_list(text) for text in (" [1]", "x", "[", "{}")] == [[1], None, None, None]
    assert parse_turns('[{"role": "user"}]', "x") == [{"role": "user"}]
    assert [parse_turns(text, "x") for text in ("x", "[1", "[]", "[1]", '[{"a": 1}]')] == [None] * 5
    for text, sentence in (
        ('[{"from": "human", "value": "q"}]', "x holds turns of ShareGPT: write form: sharegpt in the source"),
        (" [ {'role': 'user'}]", "x begins as turns and is no JSON: "),
        ('[{"content": "a", ', "x begins as turns and is no JSON: "),
    ):
        with pytest.raises(InvalidRow) as refused:
            parse_turns(text, "x")
        assert str(refused.value).startswith(sentence)
    assert [to_text(value, "x", "bad_answer") for value in (2.0**53, 2.0**53 - 1, 1e-3)] == [
        *("9007199254740992.0", "9007199254740991", "0.001")
    ]
    for value in (True, None, [1], float("nan")):
        with pytest.raises(InvalidRow) as refused:
            to_text(value, "x", "bad_answer")
        assert str(refused.value) == f"x must be text or a number, found {value!r}: write one x as text"
