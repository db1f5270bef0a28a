"""The script for xLAM's function calls, on rows of our own in the form of the original."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from data_feeds.chat.tool_specs import check_tools
from data_feeds.feed import load_groups, load_prompts
from data_prep import xlam
from data_prep.xlam import make_schema
from unit_tests.helpers.chat_families import load_family

PARAMETERS: dict[str, Any] = {
    "city": {"description": "Name of the city.", "type": "str"},
    "days": {"description": "How many.", "type": "int, optional", "default": 1},
    "hours": {"description": "Which.", "type": "List[int], optional"},
}
TOOL = {"name": "forecast", "description": "Tell the weather.", "parameters": PARAMETERS}
CALL = {"name": "forecast", "arguments": {"city": "Bern", "hours": [6, 18]}}


def original(n, *, query="Weather in Bern?", tools: Any = (TOOL,), answers: Any = (CALL,)) -> dict[str, Any]:
    return {"id": n, "query": query, "tools": json.dumps(tools), "answers": json.dumps(answers)}


def test_a_row_of_the_original_is_a_prompt_with_tools_and_its_calls():
    [row], invalid = xlam.make([original(7)])
    assert not invalid.rows and (row.id, row.messages) == ("xlam/7", [{"role": "user", "content": "Weather in Bern?"}])
    assert json.loads(row.answer) == [CALL]
    [tool] = json.loads(row.tools or "")
    check_tools([tool])
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city."},
            "days": {"type": "integer", "description": "How many.", "default": 1},
            "hours": {"type": "array", "items": {"type": "integer"}, "description": "Which."},
        },
        "required": ["city"],
    }


@pytest.mark.parametrize(
    ("written", "schema", "optional"),
    [
        ("str", {"type": "string"}, False),
        ("bool, optional", {"type": "boolean"}, True),
        ("Tuple[int, int]", {"type": "array"}, False),
        ("List[Dict[str, List[int]]]", {"type": "array", "items": {"type": "object"}}, False),
        (
            "List[List[float]], optional",
            {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            True,
        ),
        ("typing.Dict", {"type": "object"}, False),
        ("Any", {}, False),
        ("", {}, False),
        ("string", {"type": "string"}, False),
        ("Optional[List[int]]", {"type": "array", "items": {"type": "integer"}}, True),
        ("typing.Union[str, float]", {"anyOf": [{"type": "string"}, {"type": "number"}]}, False),
        ("Union[bool, Any], optional", {"anyOf": [{"type": "boolean"}, {}]}, True),
    ],
)
def test_types_of_python_become_those_of_json(written, schema, optional):
    assert make_schema(written) == (schema, optional)


def test_the_calls_are_the_last_turn_of_a_row_of_sft():
    [row], _ = xlam.make([original(7, answers=[CALL, {**CALL, "arguments": {"city": "Zürich"}}])], sft=True)
    asked, called = row.messages
    assert asked == {"role": "user", "content": "Weather in Bern?"}
    assert called == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": CALL},
            {"id": "call00001", "type": "function", "function": {"name": "forecast", "arguments": {"city": "Zürich"}}},
        ],
    }
    assert "Zürich" in row.answer


def test_rows_that_cannot_be_used_are_counted_by_reason():
    records = [
        original(0),
        original(1, query=" "),
        original(2, tools=["forecast"]),
        original(3) | {"tools": "[{"},
        original(4, tools=[TOOL, TOOL]),
        original(5, answers=[{**CALL, "name": "fly"}]),
        original(6, answers=[{"name": "forecast", "arguments": {"city": 3}}]),
        original(7, answers={}),
        original(8, answers=[]),
    ]
    rows, invalid = xlam.make(records, sft=True)
    assert [row.id for row in rows] == ["xlam/0"]
    assert {reason: case.rows for reason, case in invalid.cases.items()} == {
        "missing_column": 1,
        "bad_tools": 3,
        "bad_answer": 3,
        "no_reply": 1,
    }
    assert len(xlam.make(records)[0]) == 2, "without --sft a question that needs no call is one too"


@pytest.mark.parametrize(("column", "reason"), [("tools", "bad_tools"), ("answers", "bad_answer")])
def test_what_is_wrong_with_a_column_is_said(column, reason):
    for text, why in (("[{", "is no JSON: Expecting property name"), ("3", "must be JSON text of a list, found 3")):
        _, invalid = xlam.make([original(0) | {column: text}], sft=True)
        assert invalid.cases[reason].why.startswith(f"{column} {why}")


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_what_the_script_writes_is_what_a_run_reads(form, tmp_path: Path, tiny_path, capsys):
    """Two rows whose calls have different arguments: in Parquet none of them gets the other's as null."""
    other = {"name": "add", "arguments": {"a": 1, "b": 2.5}}
    numbers = {name: {"description": "", "type": "float"} for name in "ab"}
    add = {"name": "add", "description": "Add.", "parameters": numbers}
    source, out = tmp_path / "original.json", tmp_path / f"rows.{form}"
    records = [original(0), original(1, query="1+2.5?", tools=[TOOL, add], answers=[other, CALL])]
    source.write_text(json.dumps(records), encoding="utf-8")
    chat = load_family(tiny_path, tmp_path, "qwen2.5")
    xlam.main(["--from", str(source), "--out", str(out), "--sft"])
    data = RowDataConfig(train=str(out), max_tokens=3000, max_invalid_fraction=0)
    groups = load_groups(data, "train", chat, rows="conversations", seed=0).all()
    called = [[call["function"] for call in s.prompt.messages[1].get("tool_calls", [])] for [s] in groups]
    assert called == [[CALL], [other, CALL]]
    xlam.main(["--from", str(source), "--out", str(out), "--limit", "1"])
    [prompt] = load_prompts(PromptDataConfig(train=str(out), max_prompt_tokens=3000), "train", chat, seed=0).all()
    assert json.loads(prompt.answer) == [CALL] and prompt.tools[0]["function"]["name"] == "forecast"
    assert f"{out}: 1 rows" in capsys.readouterr().out
