"""Draws of rows, whole: permutations, mixtures, row groups and samplers, and the sentence of each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core.types.arrays import to_column
from data_feeds.rows.disk_rows import ParquetRows
from data_feeds.rows.mixture import interleave_sources, pick_row_with_replacement, whole_parts
from data_feeds.rows.permute import permute
from data_feeds.samplers.base import History, Sampler, choose_rows, take_best
from data_feeds.samplers.find import find_sampler
from unit_tests.helpers.prompt_files import rows_of, write
from unit_tests.helpers.sentences import tell


def test_draws_are_those_that_recorded_runs_had():
    assert [permute(i, 10, "a") for i in range(10)] == [9, 0, 4, 5, 1, 7, 8, 2, 3, 6]
    assert [pick_row_with_replacement("0", draw, 10) for draw in range(8)] == [9, 5, 4, 5, 7, 6, 8, 9]
    assert [interleave_sources(parts) for parts in ((2, 3), (1, 1, 4), (0, 2))] == [
        *([1, 0, 1, 0, 1], [2, 2, 0, 2, 1, 2], [1, 1])
    ]
    assert tell(lambda: whole_parts([0.333333, 1.0], where="data.train")) == (
        "data.train: the ratios 0.333333, 1.0 are exact only over 1333333 rows, and a mixture repeats after at most "
        "100000: round them to fewer digits"
    )


def test_row_groups_are_read_as_they_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("data_feeds.rows.disk_rows.WINDOW", 15)
    rows = ParquetRows(Path(write(tmp_path / "rows.parquet", rows_of(20), group=7)), "data.train")
    assert rows.kind == "row groups of Parquet, shuffled within windows of 3 groups in random order"
    assert (rows.sizes, rows.starts, len(rows)) == ([7, 7, 6], [0, 7, 14, 20], 20)
    assert [rows.read(n)["id"] for n in (0, 6, 7, 13, 14, 19)] == ["r0", "r6", "r7", "r13", "r14", "r19"]
    monkeypatch.setattr("data_feeds.rows.disk_rows.LARGEST_GROUP", 6)
    path = tmp_path / "rows.parquet"
    assert tell(lambda: ParquetRows(path, "k")) == (
        "k has a row group of 7 rows, and a row is read with its group: write it with groups of at most 6 rows (python "
        f"-m data_prep.regroup {path} --out NEW), or set lazy: false for the source to read all rows before the start"
    )


def test_about_twenty_thousand_rows_of_row_groups_are_shuffled_together(tmp_path):
    table = pa.table({"id": np.arange(50_000)})
    for group, windows in ((10_000, 2), (9_999, 3), (25_000, 1)):
        pq.write_table(table, tmp_path / "rows.parquet", row_group_size=group)
        rows = ParquetRows(tmp_path / "rows.parquet", "data.train")
        assert rows.kind == f"row groups of Parquet, shuffled within windows of {windows} groups in random order"


class Wrong(Sampler):
    """Sampler that returns what it was told to."""

    def choose(self, pool: Any, history: History, *, count: int, rng: np.random.Generator) -> Any:
        return to_column(self.pass_reward, np.dtype(np.float64))


def test_a_sampler_that_chooses_wrongly_is_one_sentence():
    pool, history, rng = np.arange(3), History.empty(3), np.random.default_rng(0)
    assert tell(lambda: choose_rows(Wrong(file="x.py"), pool, history, count=2, rng=rng)) == (
        "data.sampler=x.py: choose() must return 2 whole numbers, and returned an array of float64 with the shape []"
    )
    assert tell(lambda: find_sampler({"name": "pools", "hard_below": 0.75})).endswith(
        "hard_below=0.75 must be below easy_above=0.75"
    )
    for given in ({}, {"name": "pools", "file": "x.py"}, {"name": 3}):
        assert tell(lambda one=given: find_sampler(one)) == (
            "data.sampler needs either a name (of a module of data_feeds/samplers/) or a file (a path)"
        )
    assert take_best(np.array([4, 2, 4]), np.array([1.0, 1.0, 5.0]), 3).tolist() == [4, 2, 4]
    assert history.seen.tolist() == [False] * 3 and not history.view().drawn.flags.writeable
