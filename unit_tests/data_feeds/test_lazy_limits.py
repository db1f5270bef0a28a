"""Rows on disk at their limits: what each line is, when a digest changes, and how far an invalid row is replaced."""

from __future__ import annotations

import json
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from configs.data_schema import PromptDataConfig
from core.errors import RunStopped
from data_feeds.disk_source import CHECKED, TRIES, DiskSource
from data_feeds.feed import Feed, load_examples, load_prompts
from data_feeds.rows.disk_rows import ArrowRows, DatasetRows, JsonlRows, ParquetRows, hash_file_ends, shuffle_whole
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.line_index import find_lines, index_lines
from data_feeds.rows.mixture import pick_row, pick_row_with_replacement
from data_feeds.rows.permute import permute
from unit_tests.helpers.prompt_files import rows_of, write
from unit_tests.helpers.sentences import tell


def test_lines_of_a_file_are_rows_or_say_why_not(tmp_path):
    (path := tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a"\n[1]\n"\xff"\n{"a": "\xc3\xa9"}')
    rows = JsonlRows(path, "k")
    assert len(rows) == 5 and [rows.read(i) for i in (0, 4)] == [{"a": 1}, {"a": "é"}]
    assert tell(lambda: rows.read(1), InvalidRow).startswith("it is no JSON: k, row 1 is not JSON: Expecting ':'")
    assert tell(lambda: rows.read(2), InvalidRow) == "it is not a JSON object, found [1]"
    assert tell(lambda: rows.read(3), InvalidRow).startswith("it is no JSON: ")
    with pytest.raises(InvalidRow) as refused:
        rows.read(3)
    assert refused.value.reason == "bad_text"


def test_files_without_rows_are_told(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n \n")
    empty = pyarrow.table({"a": pyarrow.array([], pyarrow.int64())})
    pyarrow.parquet.write_table(empty, tmp_path / "x.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "x.arrow"), empty.schema) as writer:
        writer.write_table(empty)
    kinds: list[Any] = [JsonlRows, ParquetRows, ArrowRows]
    for kind, suffix in zip(kinds, ("jsonl", "parquet", "arrow"), strict=True):
        assert tell(lambda kind=kind, suffix=suffix: kind(tmp_path / f"x.{suffix}", "k")) == "k has no rows"


def test_rows_at_the_edges_of_batches_are_found(tmp_path):
    for name in ("x.arrow", "x.stream.arrow"):
        rows = ArrowRows(Path(write(tmp_path / name, rows_of(20), group=7)), "k")
        assert [rows.read(i)["id"] for i in (0, 6, 7, 13, 14, 19)] == ["r0", "r6", "r7", "r13", "r14", "r19"]
        assert len(rows) == 20 and rows.kind == "rows of Arrow, shuffled as a whole"


def test_a_digest_tells_of_every_change(tmp_path):
    def digest(*rows: dict[str, Any]) -> str:
        return DatasetRows(Dataset.from_list([*rows])).digest

    a, b, c = {"x": 1}, {"x": 2}, {"x": 3}
    whole = digest(a, b, c)
    assert whole == digest(a, b, c)
    assert len({whole, digest(a, b), digest(b, b, c), digest(a, b, b), digest(a, b, b, c)}) == 5
    assert digest({"x": 1, "y": None}) != digest({"x": 1, "z": None})
    path = tmp_path / "x"
    path.write_bytes(bytes(3 * 2**20))
    index = np.array([0, 5], dtype=np.uint64)
    first = hash_file_ends(path, index)
    assert first == hash_file_ends(path, index) != hash_file_ends(path, np.array([0, 6], dtype=np.uint64))
    path.write_bytes(bytes(3 * 2**20 + 1))
    assert first != hash_file_ends(path, index), "it is longer, and its ends are as they were"
    path.write_bytes(bytes(3 * 2**20 - 1) + b"x")
    assert first != hash_file_ends(path, index)


def test_large_sets_are_shuffled_by_a_permutation_of_each_pass(monkeypatch):
    monkeypatch.setattr("data_feeds.rows.disk_rows.WHOLE_SHUFFLE", 10)
    for nth in (0, 1):
        draws = range(10 * nth, 10 * nth + 10)
        assert [shuffle_whole("s", draw, 10) for draw in draws] == [pick_row("s", draw, 10) for draw in draws]
        draws = range(11 * nth, 11 * nth + 11)
        assert [shuffle_whole("s", draw, 11) for draw in draws] == [permute(i, 11, f"s/{nth}") for i in range(11)]


def test_row_groups_come_in_windows_of_a_random_order(tmp_path, monkeypatch):
    monkeypatch.setattr("data_feeds.rows.disk_rows.WINDOW", 4)
    rows = ParquetRows(Path(write(tmp_path / "x.parquet", rows_of(20), group=4)), "k")
    assert rows.per_window == 1 and rows.sizes == [4] * 5
    for nth in (0, 2):
        groups = [permute(i, 5, f"s/{nth}/groups") for i in range(5)]
        expected = [4 * group + permute(i, 4, f"s/{nth}/{n}") for n, group in enumerate(groups) for i in range(4)]
        assert [rows.pick("s", 20 * nth + i) for i in range(20)] == expected


@pytest.mark.parametrize(("more", "is_kept"), [(0, True), (1, False)])
def test_the_index_of_a_large_file_is_kept(tmp_path, monkeypatch, more, is_kept):
    (path := tmp_path / "x.jsonl").write_text("{}\n\n{}\n")
    monkeypatch.setattr("data_feeds.rows.line_index.KEPT_BYTES", path.stat().st_size + more)
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path / "cache"))
    assert index_lines(path).tolist() == [0, 4]
    assert (tmp_path / "cache/indices").is_dir() == is_kept


def test_an_index_is_of_no_file_of_another_size_time_or_inode(tmp_path, monkeypatch):
    """The content is the same each time: what the file system says is all that differs."""
    told = {"st_size": 6, "st_mtime_ns": 7, "st_ctime_ns": 8, "st_ino": 9}

    class Told(PosixPath):
        def stat(self, *, follow_symlinks: bool = True) -> Any:
            return SimpleNamespace(**told)

    searched: list[Path] = []

    def search(path: Path) -> Any:
        searched.append(path)
        return find_lines(path)

    monkeypatch.setattr("data_feeds.rows.line_index.find_lines", search)
    monkeypatch.setattr("data_feeds.rows.line_index.KEPT_BYTES", 1)
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path / "cache"))
    (path := Told(tmp_path / "x.jsonl")).write_text("{}\n{}\n")
    for name in (None, *told):
        told |= {} if name is None else {name: told[name] + 1}
        searched.clear()
        assert [index_lines(path).tolist() for _ in range(2)] == [[0, 3]] * 2
        assert searched == [path], f"another {name}"


BAD: dict[str, Any] = {"id": "bad", "messages": [], "answer": ""}


def load(path: Path, rows: list[dict[str, Any]], tokenizer: Any, *, most: float = 1.0, **source: Any) -> Feed[Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PromptDataConfig(train=[{"path": str(path), "lazy": True, **source}], max_invalid_fraction=most)  # type: ignore[list-item]
    return load_prompts(data, "train", tokenizer, seed=3)


def source_of(feed: Feed[Any]) -> DiskSource[Any]:
    [source] = feed.sources
    assert isinstance(source, DiskSource)
    return source


def test_an_invalid_row_is_replaced_by_one_of_the_next_hundred(tmp_path, qwen):
    [fine] = rows_of(1)
    source = source_of(load(tmp_path / "x.jsonl", [fine, *[BAD] * (TRIES + 20)], qwen))
    assert source.rows == TRIES + 21 and source.read(21).id == "r0", "after the last row comes the first"
    key = f"data.train={tmp_path / 'x.jsonl'}"
    before = source.invalid.looked_at
    assert tell(lambda: source.read(20), RunStopped).startswith(f"{key}: 100 rows from row 20 on are invalid: ")
    assert source.invalid.looked_at == before + 1, "those in its place are not counted"


def test_a_source_says_what_it_reads_and_draws(tmp_path, qwen):
    path = tmp_path / "x.jsonl"
    source = source_of(load(path, rows_of(12), qwen))
    assert source.notes == [
        f"data.train={path}: 12 lines of JSONL, shuffled as a whole; they are read when they are drawn (lazy)"
    ]
    assert (source.name, source.form, source.rows, len(source.items)) == ("x", "ours", 12, 12)
    assert [source.pick(n) for n in range(15)] == [pick_row("3", n, 12) for n in range(15)]
    assert [item.id for item in source.items] == [f"r{pick_row('3', n, 12)}" for n in range(12)]
    again = source_of(load(path, rows_of(12), qwen, replacement=True))
    assert [again.pick(n) for n in range(15)] == [pick_row_with_replacement("3", n, 12) for n in range(15)]
    assert again.digest == source.digest == source.disk.digest


def test_a_row_is_converted_once_though_it_is_asked_for_twice(tmp_path, qwen):
    feed = load(tmp_path / "x.jsonl", rows_of(9), qwen)
    source = source_of(feed)
    assert source.invalid.looked_at == 9
    feed.prepare(range(4))
    feed.prepare(range(6))
    assert [feed.draw(ticket).id for ticket in range(6)] == [f"r{pick_row('3', n, 9)}" for n in range(6)]
    assert source.invalid.looked_at == 9 + 6 and not source.ahead


def test_a_run_stops_once_a_thousand_rows_have_told_too_many_invalid(tmp_path, qwen):
    [fine] = rows_of(1)
    source = source_of(load(tmp_path / "x.jsonl", [fine, BAD], qwen, most=0.5))
    while source.invalid.looked_at < CHECKED - 1:
        source.convert([1])
    assert tell(lambda: source.convert([1]), RunStopped).startswith(
        f"data.train={tmp_path / 'x.jsonl'}: 999 of 1000 drawn rows are invalid, a larger fraction than "
        "data.max_invalid_fraction=0.5: 999 bad_messages (such as row 1: "
    )
    half = source_of(load(tmp_path / "y.jsonl", [fine, BAD], qwen, most=0.5))
    while half.invalid.looked_at < CHECKED + 2:
        half.convert([0, 1])
    assert half.invalid.share == 0.5


def test_examples_of_a_lazy_source_are_the_first_of_the_file(tmp_path, qwen):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*[BAD] * 15, *rows_of(9)]))
    data = PromptDataConfig(train=[{"path": str(path), "lazy": True}])  # type: ignore[list-item]
    assert [item.id for item in load_examples(data, qwen, "prompts", rows=2).all()] == ["r0", "r1"]
    assert tell(lambda: load_examples(data, qwen, "prompts", rows=1)).startswith(
        f"data.train={path}: none of 10 rows is valid: 10 bad_messages (such as row 0: "
    )


def test_a_recorded_run_is_not_read_line_by_line(tmp_path, qwen):
    (tmp_path / "samples").mkdir()
    (tmp_path / "config.yaml").touch()
    sample = {"group": 3, "id": "p", "prompt": [{"role": "user", "content": "1+1="}], "completion": "2"}
    (tmp_path / "samples/step_00000.jsonl").write_text(json.dumps(sample))

    def start(lazy: Any) -> Feed[Any]:
        data = PromptDataConfig(train=[{"path": str(tmp_path), "lazy": lazy}])  # type: ignore[list-item]
        return load_prompts(data, "train", qwen, seed=0)

    assert tell(lambda: start(True)) == (
        f"data.train={tmp_path} is a recorded run, whose groups are put together before the start: set lazy: false"
    )
    for lazy in (False, "auto"):
        feed = start(lazy)
        assert [item.id for item in feed.all()] == ["p/step_00000/3"] and not feed.sources[0].is_lazy


def test_draws_of_each_lazy_source_are_prepared_and_no_others(tmp_path, qwen):
    sources = [
        {"path": write(tmp_path / "a.jsonl", rows_of(9)), "lazy": True, "ratio": 2},
        {"path": write(tmp_path / "b.jsonl", rows_of(8)), "lazy": True},
        {"path": write(tmp_path / "c.jsonl", rows_of(7)), "lazy": False},
    ]
    data = PromptDataConfig(train=sources)  # type: ignore[arg-type]
    feed = load_prompts(data, "train", qwen, seed=5)
    feed.prepare(range(8))
    first, second, _ = feed.sources
    assert isinstance(first, DiskSource) and isinstance(second, DiskSource)
    assert {*first.ahead} == {pick_row("5/a", n, 9) for n in range(4)}
    assert {*second.ahead} == {pick_row("5/b", n, 8) for n in range(2)}
    assert [feed.draw(ticket).source for ticket in range(4)] == ["a", "b", "a", "c"] and len(first.ahead) == 2


def test_a_lazy_source_tells_of_invalid_rows_when_they_are_drawn(tmp_path, qwen):
    system = {"role": "system", "content": "s"}
    rows = [row | {"messages": [system, *row["messages"]]} for row in rows_of(8)]
    (path := tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, BAD]))
    # whether a row needs the system prompt is not known before it is drawn
    data = PromptDataConfig(train=[{"path": str(path), "lazy": True}], system_prompt="t", max_invalid_fraction=0.2)  # type: ignore[list-item]
    feed = load_prompts(data, "train", qwen, seed=0)
    sentences, facts = feed.summary("data.train")
    assert sentences == feed.sources[0].notes and len(sentences) == 1
    assert facts["x"]["used"] == 9 and facts["x"]["invalid"]["bad_messages"]["rows"] == 1
