"""Rows that cannot be read or converted, whole: the sentence of each, from the file to the sample."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from configs.data_schema import PromptDataConfig, RowDataConfig, SourceConfig
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.open_rows import open_disk_rows
from data_feeds.rows.read_files import load_saved, read_rows
from data_feeds.rows.sources import Record, find_folder, read_extra
from unit_tests.helpers.chat_families import assistant, call, result, user
from unit_tests.helpers.sentences import tell


def read(path: Path, **source: Any) -> list[dict[str, Any]]:
    return read_rows(SourceConfig(path=str(path), **source), "k")


NO_FORMAT = (
    "k must end in .parquet, .jsonl or .csv, .json or .arrow (.jsonl.gz, .csv.gz, .json.gz), be a folder made by "
    "datasets.save_to_disk, or hub:NAME"
)
FILES: list[tuple[str, str | bytes, str]] = [
    ("a.txt", "x", NO_FORMAT),
    ("a.parquet.gz", "x", NO_FORMAT),
    ("a.arrow.gz", "x", NO_FORMAT),
    ("a.jsonl", '{"a": 1}\n\n[1]', "k, line 3 is not a JSON object: every line holds one row, {...}"),
    ("a.jsonl", '{"a": 1}\n{"a"', "k, line 2 is not JSON: Expecting ':' delimiter"),
    ("a.json", '{"a": [], "b c": 1}', "k holds an object with the keys a, b c: set split to one with a list of rows"),
    ("a.json", '{"train": 3}', "k holds an object with the keys train: set split to one with a list of rows"),
    ("a.json", "3", "k must hold a list of rows, found 3"),
    ("a.json", '[{"a": 1}, 3]', "k, row 1 is not a JSON object, found 3"),
    ("a.parquet", b"PK\x03\x04x", "k is a zip archive, and not Parquet as its name says: unpack it with unzip"),
    ("a.csv", "a,,b\n", "k, line 1: column 2 has no name: the first line names the columns"),
    ("a.csv", "a,b,a\n", "k, line 1: two columns are called a: rename one"),
    ("a.csv", "a,b\n1,2\n1,2,3\n", "k, line 3 has 3 cells, and the first line names 2 columns"),
    ("a.csv", 'a,b\n1,"2"x\n', "k, line 2 is not CSV: ',' expected after '\"'"),
]


@pytest.mark.parametrize(("name", "text", "sentence"), FILES, ids=[f"{one[0]} {one[2][:50]}" for one in FILES])
def test_a_file_that_is_no_data_set_is_one_sentence(name, text, sentence, tmp_path):
    (path := tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert tell(lambda: read(path)) == sentence


def test_files_give_their_rows(tmp_path):
    (path := tmp_path / "a.json").write_text('{"train": [{"a": 1}], "test": [{"a": 2}]}')
    assert read(path) == [{"a": 1}] and read(path, split="test") == [{"a": 2}]
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert read(path) == [{"a": 1}, {"a": 2}]
    (path := tmp_path / "a.csv").write_text('label,b\nTrue,"x\ny"\n\n 0 ,\nmaybe,z\n')
    assert read(path) == [{"label": True, "b": "x\ny"}, {"label": False, "b": None}, {"label": "maybe", "b": "z"}]
    assert read(path, columns={"label": "b"})[0] == {"label": "True", "b": "x\ny"}
    there = "there is no such file; the scripts in data_prep/ make one"
    assert tell(lambda: read(tmp_path / "b.jsonl")) == f"k: {there}"
    lazy = SourceConfig(path=str(tmp_path / "b.jsonl"), lazy=True)
    assert tell(lambda: open_disk_rows(lazy, "k")) == f"k: {there}"
    assert tell(lambda: open_disk_rows(lazy.model_copy(update={"path": str(path)}), "k")) == (
        "k: lazy is true, and only .parquet, .jsonl (not packed), .arrow, folders of datasets.save_to_disk and data "
        "sets of the hub have an index: write one of them, or set lazy: false"
    )
    for off in (False, "auto"):
        assert open_disk_rows(lazy.model_copy(update={"lazy": off}), "k") is None
    assert tell(lambda: load_saved(tmp_path, "train", "k")) == (
        "k is a folder that datasets.save_to_disk did not make: name a file in it"
    )
    assert [find_folder(one) for one in (str(path), str(tmp_path), "hub:a/b")] == [tmp_path, tmp_path, None]


@pytest.fixture(scope="module")
def chat(tiny_path: str) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


SAID, ASKED = assistant("2"), user("1+1=")
EXTRA = "extra must be an object, or JSON of one, found "
ROWS: list[tuple[Any, dict[str, Any], str, str]] = [
    # kind of rows, a row, the reason and the sentence
    (
        "prompts",
        {"messages": [ASKED, SAID]},
        "ends_in_reply",
        "it ends with an assistant turn, so its answer would be in the prompt: remove that turn, or set "
        "data.continue_final_message if the policy is to continue it",
    ),
    ("prompts", {"messages": [user(" "), user("\n")]}, "empty", "all its messages are empty"),
    ("prompts", {"messages": "1" * 39}, "too_long", "41 tokens, more than data.max_prompt_tokens=40"),
    (
        "prompts",
        {"messages": [ASKED | {"train": True}]},
        "bad_messages",
        "a message holds train or weight, which only supervised conversations read: remove it",
    ),
    (
        "prompts",
        {"messages": "x", "answer": [1]},
        "bad_answer",
        "answer must be text or a number, found [1]: write one answer as text",
    ),
    ("prompts", {"messages": "x", "id": []}, "bad_id", "id must be text or a number, found []: write one id as text"),
    ("prompts", {"messages": "x", "extra": "[1]"}, "bad_extra", f"{EXTRA}'[1]'"),
    (
        "prompts",
        {"messages": "x\ud800"},
        "bad_text",
        'a text holds half of a character (such as "\\ud800"): write it again',
    ),
    (
        "prompts",
        {"messages": "x", "image": "a", "images": ["b"]},
        "bad_image",
        "it has image and images: keep one of them",
    ),
    (
        "prompts",
        {"messages": "x", "tools": 3},
        "bad_tools",
        "tools must be a list of {type: function, function: {name, description, parameters}}, found 3",
    ),
    ("conversations", {"messages": [ASKED]}, "no_reply", "it has no turn of assistant"),
    ("conversations", {"messages": [ASKED, SAID | {"train": False}]}, "no_reply", "it has no turn to train on"),
    ("conversations", {"messages": [ASKED, assistant(" ")]}, "empty", "an assistant turn is empty"),
    (
        "conversations",
        {"messages": [user("1" * 38), SAID]},
        "too_long",
        "42 tokens, more than data.max_tokens=40",
    ),
    ("unpaired", {"messages": [ASKED, SAID], "label": 2}, "bad_label", "label must be true, false, 1 or 0, found 2"),
    (
        "unpaired",
        {"messages": [ASKED], "label": 1},
        "no_reply",
        "messages must end in an assistant turn, found a turn of user",
    ),
    (
        "pairs",
        {"messages": "1", "chosen": [ASKED, SAID], "rejected": "3"},
        "not_one_prompt",
        "chosen is neither the reply to messages nor a conversation that begins with them",
    ),
    (
        "pairs",
        {"messages": "1", "chosen": 3, "rejected": "3"},
        "bad_messages",
        "chosen must be text or a list of {role, content} texts, found 3",
    ),
    ("pairs", {"chosen": "2", "rejected": "3"}, "missing_column", "it has no messages, and chosen is a reply alone"),
    (
        "pairs",
        {"messages": [ASKED, SAID], "chosen": "2", "rejected": "3"},
        "ends_in_reply",
        "the reply of chosen follows another assistant turn",
    ),
    (
        "pairs",
        {"chosen": [ASKED, SAID], "rejected": [user("2"), SAID]},
        "not_one_prompt",
        "chosen and rejected differ before their last reply",
    ),
    ("pairs", {"messages": "1", "chosen": "2", "rejected": " 2"}, "same_reply", "chosen and rejected are the same"),
    ("pairs", {"messages": "1", "chosen": "2"}, "missing_column", "it has no rejected"),
]


@pytest.mark.parametrize(("kind", "row", "reason", "sentence"), ROWS, ids=[f"{one[0]} {one[3][:60]}" for one in ROWS])
def test_a_row_that_cannot_be_used_is_one_sentence(kind, row, reason, sentence, chat, tmp_path):
    fine = {"messages": [ASKED, SAID], "label": 1, "chosen": "2", "rejected": "3", "id": "fine"}
    columns = {
        "prompts": ("messages", "id"),
        "pairs": ("messages", "chosen", "rejected"),
        "unpaired": ("messages", "label"),
    }
    fine = {name: fine[name] for name in columns.get(kind, ("messages",))}
    fine |= {"messages": "1+1="} if kind in ("prompts", "pairs") else {}
    (path := tmp_path / "x.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(fine)}\n")
    keys: dict[str, Any] = {"train": str(path), "max_invalid_fraction": 0.5}
    if kind == "prompts":
        feed: Any = load_prompts(PromptDataConfig(max_prompt_tokens=40, **keys), "train", chat, seed=0)
    elif kind == "unpaired":
        keys = {"train": str(path), "eval": str(path), "max_invalid_fraction": 0.5}
        feed = load_groups(RowDataConfig(max_tokens=40, **keys), "eval", chat, rows=kind, seed=0)
    else:
        feed = load_groups(RowDataConfig(max_tokens=40, **keys), "train", chat, rows=kind, seed=0)
    [(found, case)] = feed.sources[0].invalid.cases.items()
    assert (found, case.why, case.rows, len(feed.all())) == (reason, sentence, 1, 1)


def test_a_call_of_no_tool_is_told(qwen, tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    row = {"messages": [ASKED, assistant("", call("g")), result("1"), SAID], "tools": tools}
    (path := tmp_path / "x.jsonl").write_text(json.dumps(row))
    data = RowDataConfig(train=str(path), max_tokens=900)
    assert tell(lambda: load_groups(data, "train", qwen, rows="conversations", seed=0)) == (
        f"data.train={path}: none of 1 rows is valid: 1 bad_messages (such as row 0: it calls g, which is none of its "
        "tools)"
    )


def test_a_record_gives_text_columns_and_images():
    record = Record(id="a", where="k", columns={"answer": 3.0, "messages": "x", "image": "a.png"}, extra={})
    assert (record.get_answer(), record.list_images()) == ("3", ("image", ["a.png"]))
    assert Record(id="a", where="k", columns={}, extra={}).list_images() == ("images", [])
    [message] = record.get_messages("messages", text_is="user")
    assert message == {"role": "user", "content": "x", "parts": [{"type": "image"}, {"type": "text", "text": "x"}]}
    assert record.get_messages("messages", text_is="assistant") == [assistant("x")]
    assert tell(lambda: record.get_column("label"), InvalidRow) == "it has no label"
    assert read_extra('{"a": 1}') == {"a": 1} and read_extra({}) == {}
    assert tell(lambda: read_extra("{"), InvalidRow) == f"{EXTRA}'{{'"


def start(
    chat: ChatTokenizer, path: Path, rows: list[dict[str, Any]], kind: str = "conversations", **source: Any
) -> Any:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: dict[str, Any] = {"train": [{"path": str(path), **source}]}
    if kind == "prompts":
        return load_prompts(PromptDataConfig(**keys), "train", chat, seed=0).sources[0]
    return load_groups(RowDataConfig(**keys), "train", chat, rows=kind, seed=0).sources[0]  # type: ignore[arg-type]


def test_what_a_source_needs_or_leaves_is_one_sentence(chat, tmp_path):
    path, ask, truth = tmp_path / "x.jsonl", {"messages": [ASKED]}, {"reward_model": {"ground_truth": "2"}}
    key = f"data.train={path}"
    assert tell(lambda: start(chat, path, [{"messages": "all of it"}])) == (
        f"{key}: messages is plain text, which the chat template would write as the turn of a user: set data.template: "
        "plain and data.train_on: everything to train on it as it is, or name the column of the replies, too (columns: "
        "{completion: ...})"
    )
    assert tell(lambda: start(chat, path, [{"segments": [{"label": True, "text": "x"}]}])) == (
        f"{key} is of form segments, which no chat template writes: set data.template: plain"
    )
    assert tell(lambda: start(chat, path, [{"text": "x"}])) == (
        f"{key} is of form text, which no chat template writes: set data.template: plain and data.train_on: everything"
    )
    assert tell(lambda: start(chat, path, [ask | truth], "prompts", columns={"messages": "messages"})) == (
        f"{key}: no row has an answer, and reward_model.ground_truth holds one: write answer: "
        "reward_model.ground_truth into columns, or leave columns out, and the form of the rows is recognised"
    )
    assert start(chat, path, [ask | {"solution": "2"}, ask], "prompts").notes == [
        f"{key}: no row has an answer for the reward, and the column solution may hold one: write answer: solution "
        "into columns"
    ]
    assert start(chat, path, [ask | {"answer": "2", "solution": "2"}], "prompts").notes == []
    assert tell(lambda: start(chat, path, [ask, {"b": 1}], "prompts", columns={"answer": "x.y"})) == (
        f"{key} has no column x.y; it has b, messages: name the one meant in columns ({{answer: ...}})"
    )
    asked = {"form": "question_answer", "columns": {"id": "number"}}
    assert tell(lambda: start(chat, path, [{"question": "q", "answer": "a"}], **asked)) == (
        f"{key} has no column number; it has answer, question: name the one meant in columns ({{id: ...}})"
    )
    pair = {"question": "q", "answer": "a", "level": 3, "id": "r", "image": None}
    assert start(chat, path, [pair]).notes == [
        f"{key} is of form question_answer (recognised): messages = question + answer; in extra: level"
    ]
    assert start(chat, path, [pair], form="question_answer").notes == [
        f"{key} is of form question_answer (as form says): messages = question + answer; in extra: level"
    ]
    late = [{"messages": [ASKED, SAID]}] * 300 + [{"messages": [ASKED, SAID], "system": "s"}]
    assert tell(lambda: start(chat, path, late, lazy=True)) == (
        f"{key}, row 300 has system, which no row had when form ours was recognised, so it would not be read: move a "
        "row with system to the beginning of the file"
    )


def test_a_cell_of_a_csv_file_may_be_of_two_gibibytes(tmp_path):
    (tmp_path / "rows.csv").write_text(f"a\n{'x' * 200_000}\n")
    before = csv.field_size_limit(100)
    try:
        assert read(tmp_path / "rows.csv") == [{"a": "x" * 200_000}]
        assert csv.field_size_limit() == 2**31 - 1
    finally:
        csv.field_size_limit(before)


def test_a_saved_data_set_that_is_broken_or_of_other_splits_is_told(tmp_path):
    one = Dataset.from_dict({"a": [1, 2]}, split="test")
    one.save_to_disk(tmp_path / "one")
    DatasetDict({"test": one, "dev": one}).save_to_disk(tmp_path / "two")
    for folder, split in (("one", "train"), ("one", "test"), ("two", "dev")):
        assert list(load_saved(tmp_path / folder, split, "k")["a"]) == [1, 2]
    said = "k holds one split (test), and split is 'dev': leave split out"
    assert tell(lambda: load_saved(tmp_path / "one", "dev", "k")) == said
    said = "k has no split 'train'; it has test, dev: set split to one of them"
    assert tell(lambda: load_saved(tmp_path / "two", "train", "k")) == said
    (tmp_path / "one" / "state.json").write_text("{")
    said = tell(lambda: load_saved(tmp_path / "one", "train", "k"))
    assert said.startswith("k cannot be loaded by datasets.load_from_disk: ") and "\n" not in said
