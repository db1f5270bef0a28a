"""Calls and tools at their limits: which fit, and the sentence of each that does not."""

from __future__ import annotations

from typing import Any

import pytest

from data_feeds.chat.parsed_reply import finish_reply, rename_taken
from data_feeds.chat.tool_parsing import make_parser
from data_feeds.chat.tool_specs import check_tools, find_misfit, read_tools
from data_feeds.rows.invalid_rows import InvalidRow
from unit_tests.helpers.chat_families import TOOLS, assistant, call
from unit_tests.helpers.sentences import tell


def spec(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **function}}


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "array", "items": {"type": "object", "properties": {"y": {"type": "integer"}}}},
        "n": {"type": "integer", "minimum": 2},
        "p": {"type": "string", "pattern": "("},
    },
}
BAD_JSON = "The arguments of f hold a number or a depth that JSON does not have."
MISFIT = "The arguments of f do not fit its schema: "


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"n": 2}, ""),
        ({"n": 1}, f"{MISFIT}n: 1 is less than the minimum of 2."),
        ({"x": [{"y": 1}, {"y": "1"}]}, f"{MISFIT}x/1/y: '1' is not of type 'integer'."),
        ({"z": float("inf")}, BAD_JSON),
        ({"z": [float("nan")]}, BAD_JSON),
        ({"z": nest(100_000)}, BAD_JSON),
        ({"z": {"\ud800": 1}}, "The arguments of f hold half of a character."),
        ([], f"{MISFIT}[] is not of type 'object'."),
    ],
    ids=["fits", "limit", "nested", "inf", "nan", "depth", "half of a key", "a list"],
)
def test_arguments_that_do_not_fit_are_told_with_their_place(arguments, sentence):
    assert find_misfit({"name": "f", "arguments": arguments}, [spec(parameters=SCHEMA)]) == sentence


def test_a_schema_that_cannot_be_checked_is_told():
    said = find_misfit({"name": "f", "arguments": {"p": "x"}}, [spec(parameters=SCHEMA)])
    assert said.startswith(f"{MISFIT}it cannot be checked (") and said.endswith(").")


def test_sentences_about_long_names_and_values_are_cut():
    many = [spec(f"tool_{n:03}") for n in range(60)]
    names = ", ".join(f"tool_{n:03}" for n in range(60))
    assert find_misfit({"name": "g", "arguments": {}}, many) == f"There is no function g; there are {names[:300]}...."
    long = find_misfit({"name": "f", "arguments": {"n": "x" * 400}}, [spec(parameters=SCHEMA)])
    assert long == MISFIT + ("n: '" + "x" * 400)[:300] + "...."
    assert find_misfit({"name": "a\nb", "arguments": {}}, [spec()]) == "There is no function 'a\\nb'; there is f."


def test_a_tool_without_parameters_takes_any_arguments():
    bare: list[Any] = [{"type": "function", "function": {"name": "f"}}, spec("g", parameters=None)]
    for name in ("f", "g"):
        assert find_misfit({"name": name, "arguments": {"z": 1}}, bare) == ""


NO_SCHEMA = "parameters of the tool f are no JSON schema: "


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ([spec(parameters={"type": "object", "x": {1}})], f"{NO_SCHEMA}Object of type set is not JSON serializable"),
        ([spec(parameters={"type": "object", "required": "x"})], f"{NO_SCHEMA}'x' is not of type 'array'"),
        (
            [spec(), spec("g", parameters={"type": "object", "properties": 3})],
            "parameters of the tool g are no JSON schema: 3 is not of type",
        ),
        ([spec("f"), spec("g"), spec("g"), spec("f")], "two tools are called 'f'"),
        ([spec(), spec("h" * 80, description=3)], f"the description of the tool {'h' * 60} must be text, found 3"),
        ([spec(3)], "a tool has no name, found {'name': 3, 'parameters': {'type': 'object'}}"),
        ([{"type": "function", "function": "f"}], "a tool must be {type: function, function: {name, description,"),
    ],
    ids=["a set", "a flaw", "the second", "twice", "a long name", "a number", "no object"],
)
def test_a_tool_that_is_none_is_told(tools, sentence):
    assert tell(lambda: check_tools(tools), InvalidRow).startswith(sentence)


def test_tools_that_are_right_pass():
    check_tools([])
    check_tools([spec(description=None), spec("g", description="")])
    assert read_tools("[]", fills_gaps=True) == []
    assert tell(lambda: read_tools('{"a": 1}', fills_gaps=False), InvalidRow).endswith("found {'a': 1}")


def test_ids_of_calls_are_of_the_tokens_and_the_place():
    calls: list[Any] = [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]

    def name(ids: list[int]) -> list[str]:
        message = finish_reply(ids, content="", reasoning="", calls=calls, tools=[]).message
        return [one["id"] for one in message.get("tool_calls", [])]

    first, other = name([1, 23]), name([12, 3])
    assert first == name([1, 23]) and not {*first} & {*other}
    assert first[0][:6] == first[1][:6] and [one[6:] for one in first] == ["000", "001"]


def test_only_the_ids_that_are_taken_are_renamed():
    taken = call("f", "aaaaaa001")
    reply = assistant("x", call("g", "bbbbbb000"), call("f", "aaaaaa001"), reasoning="hm")
    renamed = rename_taken(reply, [assistant("", taken)])
    kept, new = renamed.get("tool_calls", [])
    assert kept == call("g", "bbbbbb000")
    assert new["id"] != "aaaaaa001" and len(new["id"]) == 9 and new["id"].endswith("001")
    assert new["function"] == taken["function"] and renamed.get("reasoning") == "hm"
    twice = rename_taken(assistant("x", taken, taken), [assistant("", taken)])
    assert len({one["id"] for one in twice.get("tool_calls", [])}) == 2


CALLS = '{"name": "weather", "parameters": {"place": "Oslo; or not"}}'
SUM = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
READ: list[tuple[str, list[str], str]] = [
    # a reply, the functions that it calls, and its content
    (CALLS, ["weather"], ""),
    (f"  {CALLS}", ["weather"], ""),
    (f"{CALLS};{SUM}", ["weather", "add"], ""),
    (f"{CALLS}; <|python_tag|>{SUM}", ["weather", "add"], ""),
    (f"<|python_tag|> {CALLS}", ["weather"], ""),
    ("<|python_tag|>print(1)", [], "print(1)"),
    ('{"names": 3}', [], '{"names": 3}'),
    ('[{"name": "x"}]', [], '[{"name": "x"}]'),
]


@pytest.mark.parametrize(("text", "names", "content"), READ)
def test_llamas_calls_are_the_whole_reply(families, text, names, content):
    chat = families["llama3"]
    found = make_parser("llama3_json", chat).parse(chat.encode(text), text, TOOLS)
    assert [one["function"]["name"] for one in found.message.get("tool_calls", [])] == names
    assert (found.message["content"], found.problem) == (content, "")


def test_texts_around_a_call_are_lines(families):
    chat = families["hermes"]
    text = 'One.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>Two.'
    found = make_parser("hermes", chat).parse(chat.encode(text), text, TOOLS)
    assert found.message["content"] == "One.\nTwo." and len(found.message.get("tool_calls", [])) == 1
