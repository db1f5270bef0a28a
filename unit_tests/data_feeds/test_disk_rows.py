"""Lazy sources: rows found by an index and converted when they are drawn, in an order without memory."""

import json
import os
import random
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from datasets import Dataset, Features, Image, Value

from configs.data_schema import PromptDataConfig, RowDataConfig, SourceConfig
from core.errors import RunStopped, UserError
from data_feeds.disk_source import DiskSource
from data_feeds.feed import Feed, load_groups, load_prompts
from data_feeds.rows.disk_rows import DatasetRows, ParquetRows, shuffle_whole
from data_feeds.rows.line_index import find_lines, index_lines
from data_feeds.rows.open_rows import open_disk_rows
from data_feeds.rows.permute import permute
from data_prep.regroup import regroup
from unit_tests.helpers.prompt_files import rows_of, write


@pytest.fixture
def tokenizer(qwen):
    return qwen


def load(path: str, tokenizer, *, lazy: bool | str = True, **others) -> Feed:
    data = PromptDataConfig(train=[{"path": path, "lazy": lazy}], **others)
    return load_prompts(data, "train", tokenizer, seed=3)


def test_a_keyed_permutation_has_each_number_once_and_keys_differ():
    for n in (1, 2, 3, 7, 64, 65, 1000):
        assert sorted(permute(i, n, "a") for i in range(n)) == list(range(n))
    a, b = ([permute(i, 5000, key) for i in range(5000)] for key in "ab")
    assert a != b and len({*a}) == 5000
    # of a random order, one of 5000 neighbours follows; and about one place is fixed
    assert sum(y - x == 1 for x, y in pairwise(a)) < 9 and sum(i == x for i, x in enumerate(a)) < 9
    # chi-square of 10 x 10 cells of place and number, 81 degrees of freedom: above 126 once in a thousand
    cells = Counter((i // 500, x // 500) for i, x in enumerate(a))
    assert sum((cells[i, j] - 50) ** 2 / 50 for i in range(10) for j in range(10)) < 126


def test_images_of_a_saved_set_stay_as_they_are_stored(tmp_path):
    image = PIL.Image.new("RGB", (2, 2))
    features = Features({"id": Value("string"), "image": Image()})
    made = Dataset.from_list([{"id": str(n), "image": image} for n in range(2)], features=features)
    rows, again = DatasetRows(made), DatasetRows(made)
    assert isinstance(rows.read(1)["image"]["bytes"], bytes) and rows.read(1)["id"] == "1"
    assert rows.digest == again.digest


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.arrow", "rows.stream.arrow", "rows"])
def test_every_pass_has_every_row_once_with_what_it_holds(tmp_path, tokenizer, name):
    feed = load(write(tmp_path / name, rows_of(50)), tokenizer)
    again = load(str(tmp_path / name), tokenizer)
    passes = [[feed.draw(ticket) for ticket in range(50 * n, 50 * n + 50)] for n in range(2)]
    for drawn in passes:
        assert sorted(p.id for p in drawn) == sorted(f"r{i}" for i in range(50))
        assert all(p.answer == p.id[1:] and p.messages[0]["content"] == f"What is {p.answer}?" for p in drawn)
    assert passes[0] != passes[1]
    assert again.draw(73) == passes[1][23], "a ticket's row needs no earlier draw"
    assert "50 " in feed.summary("data.train")[0][0] and "read when they are drawn" in feed.summary("data.train")[0][0]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.arrow", "rows"])
def test_a_small_set_has_the_same_rows_lazy_and_not(tmp_path, tokenizer, name):
    path = write(tmp_path / name, rows_of(20))
    lazy, eager = (load(path, tokenizer, lazy=lazy) for lazy in (True, False))
    assert [lazy.draw(t) for t in range(45)] == [eager.draw(t) for t in range(45)]


def test_large_sets_are_permuted_without_memory():
    assert len({shuffle_whole("s", i, 10_000_000) for i in range(2000)}) == 2000
    assert shuffle_whole("s", 10_000_005, 10_000_000) != shuffle_whole("s", 5, 10_000_000)


def test_windows_of_row_groups_lose_no_row_at_the_end_of_a_pass(tmp_path, monkeypatch):
    monkeypatch.setattr("data_feeds.rows.disk_rows.WINDOW", 20)
    rows = ParquetRows(tmp_path / write(tmp_path / "rows.parquet", rows_of(101)), "data.train")
    assert rows.per_window == 3
    for nth in range(3):
        drawn = [rows.pick("0", nth * 101 + i) for i in range(101)]
        assert sorted(drawn) == list(range(101))
        # the groups of a window are read once, while it is drawn
        assert max(len({row // 7 for row in drawn[i : i + 21]}) for i in range(0, 80, 21)) <= 6
    assert len(rows._held) == 0
    [rows.read(rows.pick("0", i)) for i in range(101)]
    assert len(rows._held) <= 6


def test_an_invalid_row_is_replaced_by_the_next_and_counted(tmp_path, tokenizer):
    rows = rows_of(40)
    rows[5] = {"id": "long", "messages": [{"role": "user", "content": "x" * 9000}], "answer": ""}
    path = tmp_path / "rows.jsonl"
    lines = [*map(json.dumps, rows)]
    lines[39] = '{"messages": [{"role"'
    path.write_text("\n\n".join(lines))  # and lines that are empty
    feed = load(str(path), tokenizer)
    drawn = Counter(feed.draw(ticket).id for ticket in range(40))
    assert len(drawn) == 38 and drawn["r6"] == drawn["r0"] == 2
    cases = feed.sources[0].invalid.cases
    assert cases["too_long"].example == "5" and "it is no JSON" in cases["bad_text"].why


@pytest.mark.parametrize("blank", ["\r\n\r\n", "\r\n \t\r\n", "\n\r\n\n  \n"])
def test_blank_lines_are_no_rows_whatever_ends_them(tmp_path, tokenizer, blank):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f"{blank}{blank.join(map(json.dumps, rows_of(20)))}{blank}".encode())
    lazy, eager = (load(str(path), tokenizer, lazy=lazy) for lazy in (True, False))
    assert [lazy.draw(t) for t in range(45)] == [eager.draw(t) for t in range(45)]
    assert not lazy.sources[0].invalid.rows


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_are_those_of_the_text_however_it_is_read(tmp_path, monkeypatch, size):
    """Lines begin at the end of a part, at the start of the next, or after the last."""
    monkeypatch.setattr("data_feeds.rows.line_index.CHUNK_BYTES", size)
    path, rng = tmp_path / "rows.jsonl", random.Random(size)
    for _ in range(60):
        text = "".join(rng.choices(["\n", "\r", " ", "\t", "a"], k=rng.randrange(14)))
        path.write_bytes(text.encode())
        lines = text.split("\n")
        starts = [sum(len(line) + 1 for line in lines[:n]) for n, line in enumerate(lines) if line.strip()]
        assert find_lines(path).tolist() == starts, text


def test_a_file_of_blank_lines_has_no_rows(tmp_path, tokenizer):
    (tmp_path / "rows.jsonl").write_bytes(b"\n\r\n \n")
    with pytest.raises(UserError, match="has no rows"):
        load(str(tmp_path / "rows.jsonl"), tokenizer)


def test_too_many_invalid_rows_stop_the_start_or_the_run(tmp_path, tokenizer):
    bad = [{"id": "bad", "messages": [], "answer": ""}] * 20
    path = write(tmp_path / "rows.jsonl", [*rows_of(20), *bad])
    with pytest.raises(UserError, match="20 of the first 40 rows that are drawn are invalid, a larger fraction than"):
        load(path, tokenizer)
    feed = load(path, tokenizer, max_invalid_fraction=0.5)
    [source] = feed.sources
    assert isinstance(source, DiskSource)
    with pytest.raises(RunStopped, match=r"rows are invalid, a larger fraction than data.max_invalid_fraction=0.5"):
        [source.convert(range(20, 40)) for _ in range(48)]


def test_invalid_rows_side_by_side_count_once_per_draw(tmp_path, tokenizer):
    rows = rows_of(100)
    rows[30:40] = [{"id": "bad", "messages": [], "answer": ""}] * 10
    feed = load(write(tmp_path / "rows.jsonl", rows), tokenizer, max_invalid_fraction=0.2)
    [feed.draw(ticket) for ticket in range(100)]
    invalid = feed.sources[0].invalid
    # looked at once at the start, and once in this pass
    assert (invalid.rows, invalid.looked_at) == (20, 200)


def test_rows_of_the_next_step_are_converted_by_a_thread_in_the_background(tmp_path, tokenizer):
    rows = [row | {"messages": [*row["messages"], {"role": "assistant", "content": "yes"}]} for row in rows_of(30)]
    path = write(tmp_path / "rows.jsonl", rows)

    def load_rows() -> Feed:
        data = RowDataConfig(train=[{"path": path, "lazy": True}])
        return load_groups(data, "train", tokenizer, rows="conversations", seed=0)

    ahead, at_once = load_rows(), load_rows()
    ahead.prepare(range(8))
    [source] = ahead.sources
    assert len(source.ahead) == 8 and any(t.name.startswith("rows") for t in threading.enumerate())
    for ticket in range(10):
        assert ahead.draw(ticket) == at_once.draw(ticket)
    assert not source.ahead and source.invalid.looked_at == 30 + 10


@pytest.mark.parametrize(
    ("name", "others", "says"),
    [
        ("rows.csv", {}, "lazy is true, and only .parquet, .jsonl"),
        ("no.jsonl", {}, "there is no such file"),
        ("rows.jsonl", {"eval": {"from_train": 3}}, "is lazy, and data.eval.from_train reads all rows"),
        ("packed.arrow", {}, r"is compressed, so it cannot be mapped into memory: .*, or set lazy: false"),
        ("text.arrow", {}, "cannot be read as Arrow"),
        ("rows.parquet", {}, r"has a row group of 9 rows, .*python -m data_prep.regroup .*, or set lazy: false"),
    ],
)
def test_what_cannot_be_lazy_is_refused_with_the_remedy(tmp_path, tokenizer, monkeypatch, name, others, says):
    monkeypatch.setattr("data_feeds.rows.disk_rows.LARGEST_GROUP", 8)
    (tmp_path / "rows.csv").write_text("messages,answer\nhi,1\n")
    (tmp_path / "text.arrow").write_text("messages,answer\nhi,1\n")
    long = pyarrow.Table.from_pylist([row | {"text": "x" * 2**18} for row in rows_of(9)])
    pyarrow.feather.write_feather(long, str(tmp_path / "packed.arrow"), compression="lz4")
    for file in ("rows.jsonl", "rows.parquet"):
        write(tmp_path / file, rows_of(9), group=9)
    with pytest.raises(UserError, match=says):
        load(str(tmp_path / name), tokenizer, **others)


def test_only_large_files_are_lazy_by_themselves(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path / "rows.jsonl", rows_of(9))
    assert not load(path, tokenizer, lazy="auto").sources[0].is_lazy
    monkeypatch.setattr("data_feeds.rows.open_rows.LARGE_BYTES", 100)
    assert load(path, tokenizer, lazy="auto").sources[0].is_lazy
    assert not load(path, tokenizer, lazy=False).sources[0].is_lazy


@pytest.mark.parametrize("more", [0, 1])
def test_a_file_is_large_above_two_gibibytes(tmp_path, more):
    path = tmp_path / "rows.parquet"
    path.touch()
    os.truncate(path, 2**31 + more)  # sparse: it takes no room
    source = SourceConfig(path=str(path), lazy="auto")
    if more:
        with pytest.raises(pyarrow.ArrowInvalid):
            open_disk_rows(source, "data.train")
    else:
        assert open_disk_rows(source, "data.train") is None, "and is not looked into"


def test_a_file_that_changed_has_another_digest(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    digests = []
    for rows in (rows_of(9), rows_of(10), rows_of(9, first=1), rows_of(9)):
        digests.append(load(write(path, rows), tokenizer).sources[0].digest)
    assert len({*digests}) == 3 and digests[0] == digests[3]


def test_regroup_writes_the_same_rows_in_groups_that_can_be_lazy(tmp_path):
    path = write(tmp_path / "rows.parquet", rows_of(20), group=20)
    assert regroup(Path(path), tmp_path / "new.parquet", 6) == 20
    new = ParquetRows(tmp_path / "new.parquet", "data.train")
    assert new.sizes == [6, 6, 6, 2] and [new.read(row) for row in range(20)] == rows_of(20)
    with pytest.raises(UserError, match=r"no.parquet cannot be read as Parquet"):
        regroup(tmp_path / "no.parquet", tmp_path / "x.parquet", 6)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:40] + b"x" * 60 + whole[100:])
    with pytest.raises(UserError, match=r"rows.parquet cannot be read as Parquet"):
        regroup(Path(path), tmp_path / "x.parquet", 6)
    assert not list(tmp_path.glob("x.parquet*")), "a shorter file that is whole would be trained on"


def test_a_resolved_recipe_says_which_sources_are_lazy(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", rows_of(9))
    data = PromptDataConfig(train=path)
    assert data.with_forms("train", ["ours"], [False]).train == path
    [source] = data.with_forms("train", ["ours"], [True]).list_sources("train")
    assert source.lazy is True and source.form == "ours"


def test_a_kept_index_counts_only_for_the_file_that_it_is_of(tmp_path, monkeypatch):
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("data_feeds.rows.line_index.KEPT_BYTES", 1)
    searched: list[Path] = []

    def search(path: Path):
        searched.append(path)
        return find_lines(path)

    monkeypatch.setattr("data_feeds.rows.line_index.find_lines", search)
    path, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"

    def count_searches(file: Path) -> int:
        searched.clear()
        assert np.array_equal(index_lines(file), find_lines(file))
        return len(searched)

    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [count_searches(path) for _ in range(2)] == [1, 0]
    [kept] = (tmp_path / "cache/indices").iterdir()
    # a file of the same size and ends, with another line end in between, and the time of the first
    filler = "x" * 2**21
    for text in (filler + "\n" + filler, filler[1:] + "\n" + filler + "x"):
        path.write_text("[\n" + text + "\n]")
        os.utime(path, ns=(0, 0))
        assert [count_searches(path) for _ in range(2)] == [1, 0]
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-8], whole[:-1] + bytes([whole[-1] ^ 1]), b"not JSON\n" + whole):
        kept.write_bytes(damaged)
        assert [count_searches(path) for _ in range(2)] == [1, 0]
    # the index of another file under the name of this one
    other.write_text("a\nb\nc\n")
    index_lines(other)
    [of_other] = [file for file in kept.parent.iterdir() if file != kept]
    kept.write_bytes(of_other.read_bytes())
    assert count_searches(path) == 1


def test_an_index_that_cannot_be_kept_is_said(tmp_path, monkeypatch, capfd):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("FEYNRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("data_feeds.rows.line_index.KEPT_BYTES", 1)
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n{}\n")
    assert len(index_lines(path)) == 2
    assert "is not kept" in capfd.readouterr().err
