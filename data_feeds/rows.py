"""Read a data set: Parquet or JSONL with the columns id, messages and answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import UserError
from core.types import Prompt


def read_prompts(path: str, *, key: str) -> list[Prompt]:
    """Every row as a Prompt. Raises UserError naming file, row and column; `key` is the setting that named the file."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{key}={path}: there is no such file; the scripts in data_prep/ make one")
    match file.suffix:
        case ".parquet":
            rows = _parquet(file, key)
        case ".jsonl":
            rows = list(_jsonl(file, key))
        case _:
            raise UserError(f"{key}={path} must end in .parquet or .jsonl")
    if not rows:
        raise UserError(f"{key}={path} has no rows")
    prompts = [_prompt(row, i, f"{key}={path}") for i, row in enumerate(rows)]
    if len({p.id for p in prompts}) < len(prompts):
        raise UserError(f"{key}={path}: ids must be unique, and some are not: give every row an id of its own")
    return prompts


def _parquet(file: Path, key: str) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{key}={file} is not a Parquet file: {str(error).splitlines()[0]}") from error
    if "messages" not in table.column_names:
        raise UserError(f"{key}={file} has no column messages; it has {', '.join(table.column_names)}")
    return table.to_pylist()


def _jsonl(file: Path, key: str) -> Iterator[dict[str, Any]]:
    for n, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{key}={file}, line {n} is not JSON: {error.msg}") from error
        if not isinstance(row, dict) or "messages" not in row:
            raise UserError(f"{key}={file}, line {n} has no messages")
        yield row


def _prompt(row: dict[str, Any], i: int, where: str) -> Prompt:
    messages = row["messages"]
    fits = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
    )
    if not fits:
        raise UserError(
            f"{where}, row {i}: messages must be a list of {{role, content}} texts, found {str(messages)[:60]!r}"
        )
    if lost := {k for m in messages for k, v in m.items() if k not in ("role", "content") and v is not None}:
        raise UserError(
            f"{where}, row {i}: a message holds {min(lost)!r}, which no template would be shown: leave it out, or "
            "write it into the content"
        )
    extra = {k: v for k, v in row.items() if k not in ("id", "messages", "answer", "extra")}
    nested = row.get("extra") or {}
    try:
        extra |= json.loads(nested) if isinstance(nested, str) else nested
    except (json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{where}, row {i}: extra must be an object, or JSON of one, found {nested!r:.60}") from error
    return Prompt(
        id=str(row.get("id", i)),
        messages=[{"role": m["role"], "content": m["content"]} for m in messages],
        answer="" if row.get("answer") is None else str(row["answer"]),
        extra=extra,
    )
