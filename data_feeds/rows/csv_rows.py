"""CSV reader. Empty cells are missing values, and known columns are converted from text."""

from __future__ import annotations

import csv
import io
import sys
from typing import Any

from configs.data_schema import SourceConfig
from core.errors import UserError, quote

LABELS = {"true": True, "false": False, "1": True, "0": False}


def read_csv(text: str, source: SourceConfig, key: str) -> list[dict[str, Any]]:
    """Read the rows of a CSV file with a header line.

    Cells are text, and a label is true, false, 1 or 0. Raises UserError, beginning with `key`, for invalid CSV.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a cell may be a whole document
    # newline="": the csv module reads line ends inside quoted cells itself
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = next(reader, [])
        _check_names(names, key)
        return [_make_row(names, cells, source, f"{key}, line {reader.line_num}") for cells in reader if cells]
    except csv.Error as error:
        raise UserError(f"{key}, line {reader.line_num} is not CSV: {error}") from error


def _check_names(names: list[str], key: str) -> None:
    if unnamed := [i for i, name in enumerate(names, start=1) if not name.strip()]:
        raise UserError(f"{key}, line 1: column {unnamed[0]} has no name: the first line names the columns")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{key}, line 1: two columns are called {quote(twice[0])}: rename one")


def _make_row(names: list[str], cells: list[str], source: SourceConfig, where: str) -> dict[str, Any]:
    # an unquoted comma would shift all later cells into wrong columns
    if len(cells) != len(names):
        raise UserError(f"{where} has {len(cells)} cells, and the first line names {len(names)} columns")
    row: dict[str, Any] = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
    # every row has all columns, as in other file formats
    row |= {name: None for name in names if name not in row}
    label = source.columns.get("label", "label")
    if row.get(label):
        row[label] = LABELS.get(row[label].strip().lower(), row[label])
    return row
