"""Prompts in files of every kind that has an index."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
from datasets import Dataset


def rows_of(n: int, first: int = 0) -> list[dict]:
    return [
        {"id": f"r{i}", "messages": [{"role": "user", "content": f"What is {i}?"}], "answer": str(i)}
        for i in range(first, first + n)
    ]


def write(path: Path, rows: list[dict], *, group: int = 7) -> str:
    """Write rows as the suffix says, or with save_to_disk. group: rows of a row group."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(rows)
        make = pyarrow.ipc.new_stream if "stream" in path.name else pyarrow.ipc.new_file
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
    else:
        Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)
