"""Read records from Parquet, JSONL, CSV, a folder of Hugging Face datasets, or the hub."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.data_schema import SourceConfig
from core.errors import UserError, first_line, name_error
from core.hub import describe_hub, prepare_hub
from core.text.text_files import describe_format, parse_json, read_packed_text, read_text
from core.types.messages import Message, ToolSpec
from data_feeds.chat.tool_specs import read_tools
from data_feeds.rows.csv_rows import read_csv
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.read_messages import read_messages
from data_feeds.rows.values import check_characters, is_absent, load_json, parse_list, parse_turns, to_text

HUB = "hub:"
IMAGES = ("image", "images")
"""Columns with the images of a row: one image, or a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Data set row, with columns renamed to our names."""

    id: str
    where: str
    """Setting, file and row number, for error messages."""
    columns: dict[str, Any]
    """Non-null columns with one of our names."""
    extra: dict[str, Any]
    """All other columns, under their original names."""
    flaw: InvalidRow | None = None
    """Reason why the row cannot be used for any purpose."""
    repeats_id: bool = False
    """True if an earlier row has the id that the data set gives; then `id` ends in the row's number."""
    fills_gaps: bool = False
    """True for columnar files, which write null for keys that another row's object has."""

    def get_answer(self) -> str:
        """Return the answer as text, or "" if there is none. Raises InvalidRow for other types."""
        return to_text(self.columns.get("answer", ""), "answer", "bad_answer")

    def get_column(self, column: str) -> Any:
        """Return the value of a column. Raises InvalidRow if it is missing."""
        if column not in self.columns:
            raise InvalidRow("missing_column", f"it has no {column}")
        return self.columns[column]

    def get_messages(self, column: str, *, text_is: str) -> list[Message]:
        """Parse the messages in a column: turns, JSON text of turns, or other text.

        Other text is one turn of the role `text_is`; a user's follows the images.

        Images are references, not loaded yet (read_messages.py). Raises InvalidRow for an invalid list of messages.
        """
        given = self.get_column(column)
        fills_gaps = self.fills_gaps
        if isinstance(given, str) and (turns := parse_turns(given, column)) is not None:
            given, fills_gaps = turns, False  # in JSON text a null was written
        elif isinstance(given, str):
            holes = [{"type": "image"} for _ in self.list_images()[1]] if text_is == "user" else []
            given = [{"role": text_is, "content": [*holes, {"type": "text", "text": given}] if holes else given}]
        return read_messages(given, column, fills_gaps=fills_gaps)

    def list_images(self) -> tuple[str, list[Any]]:
        """Return the column with the images of the row, and the images in it, not loaded. Raises InvalidRow."""
        there = [name for name in IMAGES if name in self.columns]
        if len(there) > 1:
            raise InvalidRow("bad_image", f"it has {' and '.join(there)}: keep one of them")
        column = there[0] if there else IMAGES[-1]
        given = self.columns.get(column)
        if isinstance(given, str) and (listed := parse_list(given)) is not None:
            given = listed
        return column, [] if is_absent(given) else given if isinstance(given, list) else [given]

    def get_tools(self) -> list[ToolSpec]:
        """Return the tools of the row. Raises InvalidRow for an invalid list."""
        return read_tools(self.columns.get("tools"), fills_gaps=self.fills_gaps)


def read_records(source: SourceConfig, *, key: str, needed: Iterable[str], known: Iterable[str]) -> list[Record]:
    """Read all rows of a source. Raises UserError, beginning with `key`, for a problem of the whole source.

    needed: columns that at least one row must have. known: all columns read under our names.
    """
    known = list(known)
    # a renamed column that nothing reads is a misspelling
    if ignored := [ours for ours in source.columns if ours not in known]:
        raise UserError(f"{key}: columns names {ignored[0]}, and only {', '.join(known)} are read here: leave it out")
    rows = _read_rows(source, key)
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
    # only JSONL and CSV distinguish a missing key from null
    fills_gaps = not source.path.removesuffix(".gz").endswith((".jsonl", ".csv"))
    return _number_repeated_ids(
        [_make_record(row, i, names, f"{key}, row {i}", fills_gaps) for i, row in enumerate(rows)]
    )


def _number_repeated_ids(records: list[Record]) -> list[Record]:
    """Append the row's number to an id that an earlier row has: every row needs an id of its own."""
    given = {record.id for record in records}
    if len(given) == len(records):
        return records
    numbered: list[Record] = []
    seen: set[str] = set()
    for i, record in enumerate(records):
        if record.id in seen:
            new = f"{record.id}#{i}"
            while new in given:
                new += "#"
            record = replace(record, id=new, repeats_id=True)
        seen.add(record.id)
        numbered.append(record)
    return numbered


def find_folder(path: str) -> Path | None:
    """Return the base folder of relative image paths, or None for a hub data set."""
    if path.startswith(HUB):
        return None
    return Path(path) if os.path.isdir(path) else Path(path).parent


def _make_record(row: dict[str, Any], i: int, names: dict[str, str], where: str, fills_gaps: bool) -> Record:
    columns = {ours: row[theirs] for ours, theirs in names.items() if row.get(theirs) is not None}
    # A column extra is unpacked: the scripts in data_prep/ write it, since Parquet columns need one type.
    extra = {k: v for k, v in row.items() if k not in names.values() and k != "extra"}
    # The flaw is raised when the row is converted. So it counts as an invalid row, as any other problem of a row does.
    row_id, flaw = str(i), None
    try:
        extra |= _read_extra(row.get("extra") or {})
        row_id = to_text(columns.pop("id", i), "id", "bad_id")
        check_characters(row)
    except InvalidRow as found:
        row_id, flaw = str(i), found
    return Record(id=row_id, where=where, columns=columns, extra=extra, flaw=flaw, fills_gaps=fills_gaps)


def _read_extra(given: Any) -> dict[str, Any]:
    """Return the object in a column extra, or in JSON text of it. Raises InvalidRow for anything else."""
    try:
        extra = load_json(given) if isinstance(given, str) else given
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise InvalidRow("bad_extra", f"extra must be an object, or JSON of one, found {given!r:.60}")
    return extra


def _read_rows(source: SourceConfig, key: str) -> list[dict[str, Any]]:
    if source.path.startswith(HUB):
        return _read_hub(source, key)
    file = Path(source.path)
    if os.path.isdir(file):  # unlike file.is_dir, False for a name that is too long
        return _read_saved(file, source.split, key)
    if not os.path.isfile(file):
        raise UserError(f"{key}: there is no such file; the scripts in data_prep/ make one")
    is_packed = file.suffix == ".gz"
    match (file.with_suffix("") if is_packed else file).suffix:
        case ".parquet" if not is_packed:
            return _read_parquet(file, key)
        case ".jsonl":
            return _read_jsonl(read_packed_text(file, key) if is_packed else read_text(file, key), key)
        case ".csv":
            return read_csv(read_packed_text(file, key) if is_packed else read_text(file, key), source, key)
        case _:
            raise UserError(
                f"{key} must end in .parquet, .jsonl or .csv (.jsonl.gz, .csv.gz), be a folder made by "
                "datasets.save_to_disk, or hub:NAME"
            )


def _read_parquet(file: Path, key: str) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with file.open("rb") as head:
            found = describe_format(head.read(4))
        if found is not None and "Parquet" not in found[0]:
            raise UserError(f"{key} is {found[0]}, and not Parquet as its name says: {found[1]}")
        with pyarrow.parquet.ParquetFile(file) as table:  # read_table would import pandas
            return table.read().to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{key} is not a Parquet file: {first_line(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{key}: a column of text holds bytes that are not UTF-8: write the file again") from error
    except OSError as error:
        raise UserError(f"{key} cannot be read: {first_line(error)}") from error


def _read_jsonl(text: str, key: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{key}, line {n}")
        if not isinstance(row, dict):
            raise UserError(f"{key}, line {n} is not a JSON object: every line holds one row, {{...}}")
        rows.append(row)
    return rows


def _read_saved(folder: Path, split: str, key: str) -> list[dict[str, Any]]:
    """Load a folder with one split, or the split `split` of several."""
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise UserError(f"{key} is a folder that datasets.save_to_disk did not make: name a file in it") from error
    except Exception as error:  # a border: what a broken file of the folder makes pyarrow and datasets raise
        raise UserError(f"{key} cannot be loaded by datasets.load_from_disk: {name_error(error)}") from error
    if not isinstance(saved, DatasetDict):
        # split defaults to train, and a folder's only split may have another name
        if split != "train" and str(saved.split) != split:
            raise UserError(f"{key} holds one split ({saved.split}), and split is {split!r}: leave split out")
        return saved.to_list()
    if split not in saved:
        raise UserError(f"{key} has no split {split!r}; it has {', '.join(map(str, saved))}: set split to one of them")
    return saved[split].to_list()


def _read_hub(source: SourceConfig, key: str) -> list[dict[str, Any]]:
    prepare_hub(key)
    from datasets import load_dataset

    parts = source.path.removeprefix(HUB).split("/", 2)  # NAME is OWNER/NAME but for a few old sets
    try:
        return load_dataset("/".join(parts[:2]), *parts[2:], split=source.split).to_list()
    except Exception as error:  # a border: a name or a file of the hub that datasets cannot read raises anything
        raise UserError(
            f"{key} (split {source.split}) cannot be loaded from the hub: {first_line(error)}; {describe_hub()}"
        ) from error
