"""CSV and gzip hold the same rows as JSONL, and a file that is something else is refused by its line."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from configs.data_schema import SourceConfig
from core.errors import UserError
from core.types.messages import Message
from data_feeds.rows.sources import read_records

ROWS: list[dict[str, Any]] = [
    {"messages": "1+1=", "answer": "2", "note": 'a, "quoted"\nnote'},
    {"messages": [{"role": "user", "content": "1+2=\n"}], "answer": "3", "note": "é"},
    {"messages": "[1] is no list of turns", "answer": "", "note": "x" * 200_000},
]
KNOWN = ("id", "messages", "answer", "label")


def write_csv(path: Path, rows: list[dict[str, Any]], names: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([json.dumps(v) if isinstance(v := row[name], list) else v for name in names] for row in rows)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pack(file: Path) -> Path:
    packed = file.with_name(file.name + ".gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    return packed


def records_of(file: Path, **settings: Any) -> list[tuple[str, list[Message], dict[str, Any], dict[str, Any]]]:
    source = SourceConfig(path=str(file), **settings)
    return [
        (
            r.id,
            r.get_messages("messages", text_is="user"),
            {k: v for k, v in r.columns.items() if v != "" and k != "messages"},
            r.extra,
        )
        for r in read_records(source, key="data.train", kind="prompts", needed=["messages"], known=KNOWN).items
    ]


def test_the_rows_are_those_of_jsonl(tmp_path):
    as_csv = write_csv(tmp_path / "a.csv", ROWS, ["messages", "answer", "note"])
    as_jsonl = write_jsonl(tmp_path / "a.jsonl", ROWS)
    wanted = records_of(as_jsonl)
    assert [row[1][0]["content"] for row in wanted] == ["1+1=", "1+2=\n", "[1] is no list of turns"]
    for file in (as_csv, pack(as_csv), pack(as_jsonl)):
        assert records_of(file) == wanted, file


def test_labels_and_renamed_columns(tmp_path):
    rows = [{"q": "a", "good": value} for value in ("true", "False", "1", "0", "maybe", "")]
    file = write_csv(tmp_path / "a.csv", rows, ["q", "good"])
    found = records_of(file, columns={"messages": "q", "label": "good"})
    assert [columns.get("label") for _, _, columns, _ in found] == [True, False, True, False, "maybe", None]


BROKEN = {
    "a cell too many": ("messages,answer\na,b,c\n", "line 2 has 3 cells, and the first line names 2 columns"),
    "an open quote": ('messages\n"a\n', "is not CSV"),
    "no name": ("messages,\na,b\n", "line 1: column 2 has no name"),
    "a name twice": ("messages,messages\na,b\n", "two columns are called messages"),
    "no rows": ("messages\n", "has no rows"),
    "nothing": ("", "has no rows"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_csv_names_the_line(name, tmp_path):
    text, words = BROKEN[name]
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=f"^data.train.*{words}"):
        records_of(tmp_path / "a.csv")


def test_broken_gzip_is_refused(tmp_path):
    whole = pack(write_jsonl(tmp_path / "a.jsonl", ROWS)).read_bytes()
    file = tmp_path / "b.jsonl.gz"
    flipped = whole[:60] + bytes([whole[60] ^ 255]) + whole[61:]
    for content, words in ((whole[:-9], "broken gzip"), (flipped, "broken gzip"), (b"{}", "is not a gzip file")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=words):
            records_of(file)
    parquet = tmp_path / "a.parquet.gz"
    parquet.write_bytes(whole)
    with pytest.raises(UserError, match=r"must end in .*csv\.gz"):
        records_of(parquet)
