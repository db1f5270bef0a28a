"""Reads a .wandb file: the package has no reader in Python, so its records are found by the rules of LevelDB's log."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, FIRST_HEADER = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Yield wandb's own records."""
    from wandb.proto import wandb_internal_pb2

    for data in payloads(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def payloads(data: bytes) -> Iterator[bytes]:
    """Join the pieces of every record; a block that has no room for a header is padded."""
    at, joined = FIRST_HEADER, b""  # the file begins with ":W&B" and a version
    while at + HEADER <= len(data):
        room = BLOCK - at % BLOCK
        if room < HEADER:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if kind == 0:
            break
        joined += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield joined
            joined = b""


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, one dict per call of log."""
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows
