"""Read the rows of a source: a file of any kind, a folder of Hugging Face datasets, or a data set of the hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from configs.data_schema import SourceConfig
from core.errors import UserError, first_line, name_error, quote
from core.hub import describe_hub, prepare_hub
from core.text.text_files import describe_format, parse_json, read_packed_text, read_text
from data_feeds.rows.csv_rows import read_csv

HUB = "hub:"


def read_rows(source: SourceConfig, key: str) -> list[dict[str, Any]]:
    """Return the rows of a source, as they are. Raises UserError, beginning with `key`, if they cannot be read."""
    if source.path.startswith(HUB):
        return load_hub(source, key).to_list()
    file = Path(source.path)
    if os.path.isdir(file):  # unlike file.is_dir, False for a name that is too long
        return load_saved(file, source.split, key).to_list()
    if not os.path.isfile(file):
        raise UserError(f"{key}: there is no such file; the scripts in data_prep/ make one")
    is_packed = file.suffix == ".gz"
    match (file.with_suffix("") if is_packed else file).suffix:
        case ".parquet" if not is_packed:
            return _read_parquet(file, key)
        case ".jsonl":
            return read_jsonl(read_packed_text(file, key) if is_packed else read_text(file, key), key)
        case ".json":
            text = read_packed_text(file, key) if is_packed else read_text(file, key)
            return _read_json(text, source.split, key)
        case ".csv":
            return read_csv(read_packed_text(file, key) if is_packed else read_text(file, key), source, key)
        case ".arrow" | ".feather" if not is_packed:
            return _read_arrow(file, key)
        case _:
            raise UserError(
                f"{key} must end in .parquet, .jsonl or .csv, .json or .arrow (.jsonl.gz, .csv.gz, .json.gz), be a "
                "folder made by datasets.save_to_disk, or hub:NAME"
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


def read_jsonl(text: str, key: str) -> list[dict[str, Any]]:
    """Parse lines of JSON objects. Raises UserError, beginning with `key`, for a line that is none."""
    rows: list[dict[str, Any]] = []
    for n, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{key}, line {n}")
        if not isinstance(row, dict):
            raise UserError(f"{key}, line {n} is not a JSON object: every line holds one row, {{...}}")
        rows.append(row)
    return rows


def _read_json(text: str, split: str, key: str) -> list[dict[str, Any]]:
    """Parse a list of rows, an object with a list for each split, or lines as of JSONL."""
    lines = text.strip().split("\n", 1)
    # many files of lines have the shorter suffix
    if len(lines) == 2 and _is_whole_object(lines[0]):
        return read_jsonl(text, key)
    whole = parse_json(text, key)
    if isinstance(whole, dict):
        if split not in whole or not isinstance(whole[split], list):
            raise UserError(
                f"{key} holds an object with the keys {', '.join(map(quote, whole))}: set split to one with a list of "
                "rows"
            )
        whole = whole[split]
    if not isinstance(whole, list):
        raise UserError(f"{key} must hold a list of rows, found {whole!r:.60}")
    for n, row in enumerate(whole):
        if not isinstance(row, dict):
            raise UserError(f"{key}, row {n} is not a JSON object, found {row!r:.60}")
    return whole


def _is_whole_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_arrow(file: Path, key: str) -> list[dict[str, Any]]:
    """Read an Arrow file, or a stream as datasets writes it."""
    import pyarrow

    try:
        with pyarrow.OSFile(str(file)) as opened:
            is_file = opened.read(6) == b"ARROW1"
            opened.seek(0)
            with pyarrow.ipc.open_file(opened) if is_file else pyarrow.ipc.open_stream(opened) as reader:
                return reader.read_all().to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{key}: a column of text holds bytes that are not UTF-8: write the file again") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key} cannot be read as Arrow: {first_line(error)}") from error


def load_saved(folder: Path, split: str, key: str) -> Any:
    """Load a folder with one split, or the split `split` of several, as a datasets.Dataset."""
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
        return saved
    if split not in saved:
        raise UserError(f"{key} has no split {split!r}; it has {', '.join(map(str, saved))}: set split to one of them")
    return saved[split]


def load_hub(source: SourceConfig, key: str) -> Any:
    """Download a data set of the hub, once, as a datasets.Dataset."""
    prepare_hub(key)
    from datasets import load_dataset

    parts = source.path.removeprefix(HUB).split("/", 2)  # NAME is OWNER/NAME but for a few old sets
    try:
        return load_dataset("/".join(parts[:2]), *parts[2:], split=source.split)
    except Exception as error:  # a border: a name or a file of the hub that datasets cannot read raises anything
        raise UserError(
            f"{key} (split {source.split}) cannot be loaded from the hub: {first_line(error)}; {describe_hub()}"
        ) from error
