"""CSV reader. Empty cells are missing values, and known columns are converted from text."""

from __future__ import annotations

import csv
import io
import json
import sys
from typing import Any

from configs.data_schema import SourceConfig
from core.errors import UserError, quote

TURNS = ("messages", "chosen", "rejected")
"""Columns that may contain turns, as JSON."""
LABELS = {"true": True, "false": False, "1": True, "0": False}


def read_csv(text: str, source: SourceConfig, key: str) -> list[dict[str, Any]]:
    """Read the rows of a CSV file with a header line.

    JSON of turns is parsed in the columns messages, chosen and rejected, and JSON of texts in images. Other cells are
    text. A label is true, false, 1 or 0. Raises UserError, beginning with `key`, for invalid CSV.
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
    for ours in TURNS:
        name = source.columns.get(ours, ours)
        if row.get(name):
            row[name] = _read_turns(row[name])
    images = source.columns.get("images", "images")
    if row.get(images):
        row[images] = _read_texts(row[images])
    label = source.columns.get("label", "label")
    if row.get(label):
        row[label] = LABELS.get(row[label].strip().lower(), row[label])
    return row


def _read_turns(cell: str) -> Any:
    """Parse a cell with a JSON list of {role, content}. Any other cell is returned as text."""
    if not cell.lstrip().startswith("["):
        return cell
    try:
        turns = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    # a prompt may itself be JSON, so only lists of turns are parsed
    is_turns = isinstance(turns, list) and turns and all(isinstance(t, dict) and "role" in t for t in turns)
    return turns if is_turns else cell


def _read_texts(cell: str) -> Any:
    """Parse a cell with a JSON list of texts. Any other cell is returned as text."""
    try:
        texts = json.loads(cell) if cell.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return cell
    return texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else cell
