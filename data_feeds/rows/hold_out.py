"""Held-out rows of a training file, chosen by the hash of what they hold."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable

from core.errors import UserError
from data_feeds.rows.sources import Record


def hash_record(record: Record) -> str:
    """Hash our columns of a row, without its id: equal rows have equal hashes, wherever they stand."""
    return hashlib.sha256(json.dumps(record.columns, sort_keys=True, default=str).encode()).hexdigest()


def choose_held_out(records: Iterable[Record], rows: int, *, key: str) -> dict[str, Record]:
    """Return the first of the rows with each of the `rows` smallest hashes, by hash.

    The choice depends on no order, so a file that grows or is sorted keeps most of it. Raises UserError, beginning with
    `key`, if no row would be left for training.
    """
    first: dict[str, Record] = {}
    for record in records:
        if record.flaw is None:
            first.setdefault(hash_record(record), record)
    if len(first) <= rows:
        raise UserError(
            f"{key} has {len(first)} different rows, and data.eval.from_train={rows} leaves none of them for training: "
            "lower it"
        )
    return {found: first[found] for found in heapq.nsmallest(rows, first)}
