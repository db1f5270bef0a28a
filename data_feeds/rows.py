"""Read a source: Parquet, JSONL, a folder of Hugging Face datasets, or a name on the hub -> Records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.data_schema import SourceConfig
from core.errors import UserError, first_line
from core.types import Message
from data_feeds.invalid_rows import InvalidRow

ROLES = ("system", "developer", "user", "assistant", "tool")
HUB = "hub:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row, its columns under our names."""

    id: str
    where: str
    """Setting, file and row, for errors."""
    columns: dict[str, Any]
    """Those of ours that it has, each with a value."""
    extra: dict[str, Any]
    """All others, under their own names."""

    def has(self, column: str) -> Any:
        """Raises InvalidRow where the row has no such value."""
        if column not in self.columns:
            raise InvalidRow("missing_column", f"it has no {column}")
        return self.columns[column]

    def turns(self, column: str, *, text_is: str) -> list[Message]:
        """The messages in a column; plain text is one turn of the role `text_is`.

        Raises InvalidRow for what is no list of messages, and UserError for what would be lost or misread in silence.
        """
        given = self.has(column)
        if isinstance(given, str):
            given = [{"role": text_is, "content": given}]
        if not isinstance(given, list) or not given or not all(map(_is_message, given)):
            raise InvalidRow(
                "bad_messages", f"{column} must be text or a list of {{role, content}} texts, found {str(given)[:60]!r}"
            )
        if lost := {k for m in given for k, v in m.items() if k not in ("role", "content") and v is not None}:
            raise UserError(
                f"{self.where}: a message holds {min(lost)!r}, which no template would be shown: leave it out, or "
                "write it into the content"
            )
        if strange := sorted({m["role"] for m in given} - set(ROLES)):
            raise UserError(
                f"{self.where}: a message has the role {strange[0]!r}, which is none of {', '.join(ROLES)}: rename it "
                "(data_prep/chats.py renames those of ShareGPT)"
            )
        return [{"role": m["role"], "content": m["content"]} for m in given]


def read_records(source: SourceConfig, *, key: str, needed: Iterable[str], known: Iterable[str]) -> list[Record]:
    """Every row of a source. Raises UserError, beginning with `key`, for what is wrong with the source as a whole.

    `needed` are the columns that some row must have, `known` all that are read by our names.
    """
    known = list(known)
    if ignored := [ours for ours in source.columns if ours not in known]:
        raise UserError(f"{key}: columns names {ignored[0]}, and only {', '.join(known)} are read here: leave it out")
    rows = _read(source, key)
    if not rows:
        raise UserError(f"{key} has no rows")
    names = {ours: source.columns.get(ours, ours) for ours in known}
    there = set().union(*(row.keys() for row in rows))
    for ours in dict.fromkeys([*needed, *source.columns]):
        if names[ours] not in there:
            raise UserError(
                f"{key} has no column {names[ours]}; it has {', '.join(sorted(there))}: name the one meant in columns "
                f"({{{ours}: ...}})"
            )
    records = [_record(row, i, names, f"{key}, row {i}") for i, row in enumerate(rows)]
    if len({record.id for record in records}) < len(records):
        raise UserError(f"{key}: ids must be unique, and some are not: give every row an id of its own")
    return records


def _record(row: dict[str, Any], i: int, names: dict[str, str], where: str) -> Record:
    columns = {ours: row[theirs] for ours, theirs in names.items() if row.get(theirs) is not None}
    extra = {k: v for k, v in row.items() if k not in names.values() and k != "extra"}
    nested = row.get("extra") or {}
    try:
        extra |= json.loads(nested) if isinstance(nested, str) else nested
    except (json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{where}: extra must be an object, or JSON of one, found {nested!r:.60}") from error
    return Record(id=str(columns.pop("id", i)), where=where, columns=columns, extra=extra)


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _read(source: SourceConfig, key: str) -> list[dict[str, Any]]:
    if source.path.startswith(HUB):
        return _hub(source, key)
    file = Path(source.path)
    if file.is_dir():
        return _saved(file, source.split, key)
    if not file.is_file():
        raise UserError(f"{key}: there is no such file; the scripts in data_prep/ make one")
    match file.suffix:
        case ".parquet":
            return _parquet(file, key)
        case ".jsonl":
            return _jsonl(file, key)
        case _:
            raise UserError(
                f"{key} must end in .parquet or .jsonl, be a folder made by datasets.save_to_disk, or hub:NAME"
            )


def _parquet(file: Path, key: str) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{key} is not a Parquet file: {first_line(error)}") from error


def _jsonl(file: Path, key: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{key}, line {n} is not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise UserError(f"{key}, line {n} is not a JSON object: every line holds one row, {{...}}")
        rows.append(row)
    return rows


def _saved(folder: Path, split: str, key: str) -> list[dict[str, Any]]:
    """A folder with one split, or with several of which `split` is taken."""
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise UserError(f"{key} is a folder that datasets.save_to_disk did not make: name a file in it") from error
    if not isinstance(saved, DatasetDict):
        if split != "train" and str(saved.split) != split:
            raise UserError(f"{key} holds one split ({saved.split}), and split is {split!r}: leave split out")
        return saved.to_list()
    if split not in saved:
        raise UserError(f"{key} has no split {split!r}; it has {', '.join(map(str, saved))}: set split to one of them")
    return saved[split].to_list()


def _hub(source: SourceConfig, key: str) -> list[dict[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    parts = source.path.removeprefix(HUB).split("/", 2)  # NAME is OWNER/NAME but for a few old sets
    try:
        return load_dataset("/".join(parts[:2]), *parts[2:], split=source.split).to_list()
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise UserError(f"{key} (split {source.split}) cannot be had from the hub: {first_line(error)}") from error
