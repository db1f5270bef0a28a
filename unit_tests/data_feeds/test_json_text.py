"""Turns, tools and images as JSON text are those that the text says, in every kind of file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from data_feeds.rows.sources import Record
from unit_tests.helpers.chat_families import TOOLS, assistant, call, result, user

TALK = [user("Which?"), assistant("", call("weather", "a", place="Oslo")), result("3", "a"), assistant("3 degrees.")]
GOOD, BAD = [assistant("It is 3.")], [assistant("It is 4.")]
FORMS = ("jsonl", "csv", "parquet", "folder")


def write(folder: Path, form: str, rows: list[dict[str, Any]]) -> str:
    from datasets import Dataset

    path = folder / f"rows.{form}" if form != "folder" else folder / "rows"
    match form:
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        case "csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case "parquet":
            Dataset.from_list(rows).to_parquet(path)
        case _:
            Dataset.from_list(rows).save_to_disk(path)
    return str(path)


def rows_of(chat: ChatTokenizer, path: str, kind: Any) -> Any:
    data = RowDataConfig(train=path, max_tokens=2000, max_invalid_fraction=1.0)
    return load_groups(data, "train", chat, rows=kind, seed=0)


def prompts_of(chat: ChatTokenizer, source: Any) -> Any:
    data = PromptDataConfig(train=source, max_prompt_tokens=2000, max_invalid_fraction=1.0)
    return load_prompts(data, "train", chat, seed=0)


@pytest.mark.parametrize("form", FORMS)
def test_text_of_turns_is_turns_in_every_kind_of_file(form, families, tmp_path):
    chat = families["qwen2.5"]
    # null in an argument: JSON text says what was written, also where the file itself fills in nulls
    talk = [TALK[0], assistant("", call("weather", "a", place="Oslo", day=None)), *TALK[2:]]
    whole = write(tmp_path, form, [{"messages": json.dumps(talk), "tools": json.dumps(TOOLS)}])
    [[sample]] = rows_of(chat, whole, "conversations").all()
    assert sample.prompt.messages == talk and sample.prompt.tools == TOOLS
    assert sample.token_ids[sample.action_mask].tolist() != [], "replies are trained on"
    [prompt] = prompts_of(chat, [{"path": write(tmp_path, form, [{"prompt": json.dumps(talk[:3])}]),
                                  "columns": {"messages": "prompt"}}]).all()  # fmt: skip
    assert prompt.messages == talk[:3]
    pair = {"messages": json.dumps(TALK[:1]), "chosen": json.dumps(GOOD), "rejected": json.dumps(TALK[:1] + BAD)}
    [[chosen, rejected]] = rows_of(chat, write(tmp_path, form, [pair]), "pairs").all()
    said = [chat.decode(s.token_ids[s.action_mask].tolist()) for s in (chosen, rejected)]
    assert said == ["It is 3.", "It is 4."]


def test_text_that_only_looks_like_turns_stays_text():
    for text in ("[1] is no list", "[]", "[1, 2]", '[{"name": "a"}]', '[{"content": "a"}]', "{", '{"role": "user"}'):
        record = Record(id="0", where="", columns={"messages": text}, extra={})
        assert record.get_messages("messages", text_is="user") == [user(text)], text


UNREADABLE = {
    "cut off": ('[{"role": "user", "content": "1+', "messages begins as turns and is no JSON"),
    "python": ("[{'content': '1+1=', 'role': 'user'}]", "messages begins as turns and is no JSON"),
    "ShareGPT": ('[{"from": "human", "value": "1+1="}]', "form: sharegpt"),
    "half a character": ('[{"role": "user", "content": "\\ud800"}]', "half of a character"),
}


@pytest.mark.parametrize("form", FORMS)
def test_turns_that_cannot_be_read_are_no_prompt(form, families, tmp_path):
    rows = [{"id": name, "messages": text} for name, (text, _) in UNREADABLE.items()]
    feed = prompts_of(families["qwen2.5"], write(tmp_path, form, [*rows, {"id": "fits", "messages": "1+1="}]))
    assert [prompt.id for prompt in feed.all()] == ["fits"] and feed.sources[0].invalid.rows == len(rows)
    for name, (text, words) in UNREADABLE.items():
        one = prompts_of(families["qwen2.5"], write(tmp_path, form, [{"messages": text}, {"messages": "1+1="}]))
        [case] = one.sources[0].invalid.cases.values()
        assert words in case.why, name


def test_half_a_character_in_json_text_makes_its_row_invalid(families, tmp_path):
    broken = json.dumps(TOOLS).replace("Weather", "\\ud800").replace("weather", "w\\ud800")
    bad = assistant("", call("weather", "a") | {"function": {"name": "weather", "arguments": '{"place": "\\ud800"}'}})
    rows = [
        {"messages": TALK, "tools": broken},
        {"messages": [TALK[0], bad, *TALK[2:]], "tools": json.dumps(TOOLS)},
        {"messages": TALK, "tools": json.dumps(TOOLS)},
    ]
    feed = rows_of(families["qwen2.5"], write(tmp_path, "jsonl", rows), "conversations")
    assert len(feed.all()) == 1
    assert {reason: case.rows for reason, case in feed.sources[0].invalid.cases.items()} == {"bad_text": 2}


@pytest.mark.parametrize("given", ['["a.png", "b.png"]', ["a.png", "b.png"]])
@pytest.mark.parametrize("column", ["image", "images"])
def test_text_of_a_list_is_several_images(column, given):
    assert Record(id="0", where="", columns={column: given}, extra={}).list_images() == (column, ["a.png", "b.png"])
