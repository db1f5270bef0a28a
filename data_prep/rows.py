"""Rows in our format, with the columns id, messages and answer, and optional columns for preferences and tools."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import UserError, first_line
from core.hub import describe_hub, prepare_hub
from core.text.atomic_write import replacing
from core.text.text_files import decode_text, parse_json, read_bytes
from core.types.messages import Message, find_images
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_feeds.rows.values import check_characters
from data_prep.written_turns import embed_image, save_beside, turn_type, write_turn

Record = dict[str, Any]
"""Row in the original format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    id: str
    """Unique id within the file ("gsm8k/train/17")."""
    messages: list[Message]
    """Chat turns, with images as parts. An SFT row ends in an assistant turn."""
    answer: str
    """Ground truth for the reward, hidden from the policy."""
    chosen: str | None = None
    """Better reply to `messages` of a preference pair; `rejected` is the worse."""
    rejected: str | None = None
    label: bool | None = None
    """Whether the last reply is good, of an unpaired preference row."""
    tools: str | None = None
    """Tools of the row in OpenAI's format, as JSON."""
    extra: str | None = None
    """Other columns, such as the difficulty, as JSON. Rewards see them, and an evaluation can be split by them."""


COLUMNS = ("id", "messages", "answer", "chosen", "rejected", "label", "tools", "extra")
OPTIONAL = ("chosen", "rejected", "label", "tools", "extra")
"""Columns written only if a row has a value."""


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write Parquet, or JSONL for a name that ends in .jsonl. Missing folders are created.

    Images are embedded in Parquet, and are files in a folder beside JSONL.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # a Parquet column has one type in all rows, so the type depends on the whole file
    names = [n for n in COLUMNS if n not in OPTIONAL or any(getattr(row, n) is not None for row in rows)]
    images = any(find_images(row.messages) for row in rows)
    calls = any("tool_calls" in turn for row in rows for turn in row.messages)
    known = {"role", "content", "parts", "tool_calls"}
    others = {field for row in rows for turn in row.messages for field in turn} - known
    is_jsonl = path.suffix == ".jsonl"
    save = save_beside(path) if is_jsonl else embed_image
    plain: list[Record] = []
    for row in rows:
        messages = [write_turn(turn, save, as_parts=images and not is_jsonl) for turn in row.messages]
        plain.append({name: getattr(row, name) for name in names} | {"messages": messages})
    with replacing(path) as partial:
        if is_jsonl:
            partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in plain), encoding="utf-8")
        else:
            _write_parquet(partial, plain, names, turn_type(calls=calls, images=images, others=others))
    print(f"{path}: {len(rows)} rows")


def _write_parquet(path: Path, plain: list[Record], names: list[str], turn: Any) -> None:
    """Write rows. `messages` is a list of the given Arrow type, `label` is true or false, other columns are text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # tools and extra are JSON text: as objects, every row would get the keys of all rows
    types = {"messages": pa.list_(turn), "label": pa.bool_()}
    schema = pa.schema([(name, types.get(name, pa.string())) for name in names])
    pq.write_table(pa.Table.from_pylist(plain, schema=schema), path)


def read_records(*paths: Path) -> list[Record]:
    """Read files of JSON (a list of objects), JSONL or Parquet; .gz too. Raises UserError with file and line."""
    return [record for path in paths for record in _read_file(path)]


def _read_file(path: Path) -> list[Record]:
    if not path.is_file():
        raise UserError(f"--from {path}: there is no such file")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    whole = read_bytes(path, f"--from {path}")
    try:
        text = decode_text(gzip.decompress(whole) if path.suffix == ".gz" else whole, f"--from {path}")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"--from {path} is no whole gzip file: {first_line(error)}; download it again") from error
    if path.name.removesuffix(".gz").endswith(".json"):
        listed = parse_json(text, f"--from {path}")
        if not isinstance(listed, list):
            raise UserError(f"--from {path} must hold a list of objects, found {type(listed).__name__}")
        records = list(enumerate(listed, start=1))
    else:
        # not splitlines(), which also splits at characters that JSON text may hold, such as U+2028
        lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
        records = [(n, parse_json(line, f"--from {path}, line {n}")) for n, line in lines]
    for n, record in records:
        if not isinstance(record, dict):
            raise UserError(f"--from {path}: row {n} is not an object, found {record!r:.60}")
    return [record for _, record in records]


def _read_parquet(path: Path) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"--from {path} cannot be read as Parquet: {first_line(error)}") from error


def number_records(name: str, records: Sequence[Record]) -> list[tuple[str, Record]]:
    """Return (id, record) pairs with the ids name/0, name/1, ..."""
    return [(f"{name}/{i}", record) for i, record in enumerate(records)]


def filter_records(
    numbered: list[tuple[str, Record]], make: Callable[[str, Record], Row]
) -> tuple[list[Row], InvalidRows]:
    """Convert (id, record) pairs with `make`. Count refused records, and those with invalid text."""
    rows: list[Row] = []
    invalid = InvalidRows(looked_at=len(numbered))
    for row_id, record in numbered:
        try:
            check_characters(record)
            rows.append(make(row_id, record))
        except InvalidRow as error:
            invalid.add(row_id, error)
    return rows, invalid


def read_hub(name: str, split: str, /, **more: Any) -> list[Record]:
    """Read a split of a data set on the Hugging Face hub. `more`: arguments of datasets.load_dataset."""
    # before datasets is imported: it reads once, at import, whether the hub is to be asked
    prepare_hub(name)
    from datasets import load_dataset

    try:
        return load_dataset(name, split=split, **more).to_list()
    except Exception as error:  # a border: a name or a file of the hub that datasets cannot read raises anything
        raise UserError(
            f"{name} cannot be loaded from the hub: {first_line(error)}; {describe_hub()}; or use --from"
        ) from error
