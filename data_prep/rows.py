"""The columns that every data set has here: id, messages, answer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    id: str
    """Unique in its file ("gsm8k/train/17")."""
    messages: list[dict[str, str]]
    """Chat turns with "role" and "content"; one for SFT ends in an assistant's turn."""
    answer: str
    """Ground truth for the reward; the policy never sees it."""


SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("answer", pa.string()),
    ]
)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write Parquet, or JSONL when the name ends so; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA), path)
    print(f"{path}: {len(rows)} rows")
