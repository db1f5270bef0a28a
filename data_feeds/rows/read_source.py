"""Valid rows of a source, converted many at a time. Begin with read_source."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from core.errors import UserError
from core.gc_control import without_gc
from core.timing.progress import Progress
from core.types.samples import Group, Prompt
from data_feeds.chat.tokenizer import Encoded
from data_feeds.chat.turns import Piece
from data_feeds.rows.form_settings import read_checked
from data_feeds.rows.hold_out import hash_record
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_feeds.rows.row_types import RowConverter
from data_feeds.rows.sources import Record

Item = TypeVar("Item", Prompt, Group)
ROWS_AT_ONCE = 256
"""Rows whose texts are encoded in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows(Generic[Item]):
    """Valid rows of a source, in the order of the file."""

    items: list[Item]
    invalid: InvalidRows
    form: str
    notes: list[str]
    """Sentences about the form."""


def read_source(
    converter: RowConverter,
    *,
    max_invalid_fraction: float,
    limit: int | None,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
) -> SourceRows[Any]:
    """Load the valid rows of a source, at most `limit`. Raises UserError if too few are valid.

    only: ids of the rows to load; None: all. without: hashes of the rows to leave out.
    """
    key = converter.key
    read = read_checked(converter)
    records = read.items
    if only is not None:
        records = [record for record in records if record.id in only]
    if without:
        records = [record for record in records if hash_record(record) not in without]
    # many new objects and no garbage: the collector would scan all of them again and again
    with without_gc():
        items, invalid = _convert_rows(records, converter, limit)
    invalid.check(key, f"{invalid.looked_at} rows", has_valid=bool(items), most=max_invalid_fraction)
    return SourceRows(items=items, invalid=invalid, form=read.fit.name, notes=read.notes)


def _convert_rows(records: list[Record], converter: RowConverter, limit: int | None) -> tuple[list[Any], InvalidRows]:
    """Convert records until `limit` rows are valid. Count the invalid rows."""
    items: list[Any] = []
    invalid = InvalidRows()
    progress = Progress(converter.key, len(records))
    # With a limit of a few rows, encoding a full batch would be wasted work.
    at_once = min(limit or ROWS_AT_ONCE, ROWS_AT_ONCE)
    for first in range(0, len(records), at_once):
        batch = records[first : first + at_once]
        for record, outcome in zip(batch, convert_batch(batch, converter), strict=True):
            invalid.looked_at += 1
            if isinstance(outcome, InvalidRow):
                invalid.add(record.id, outcome)
            elif isinstance(outcome, UserError):
                raise outcome
            else:
                items.append(outcome)
                invalid.repeated_ids += record.repeats_id
            progress.show(invalid.looked_at)
            if len(items) == limit:
                return items, invalid
    return items, invalid


def convert_batch(records: list[Record], converter: RowConverter) -> list[Any]:
    """Convert records side by side, so that the tokenizer encodes the texts of all of them over all cores.

    Returns for each its Prompt or Group, or the InvalidRow or UserError that it raised. The caller raises them in the
    order of the rows, so the error names the first wrong row, and a row after the last needed one raises nothing.
    """
    drafts = [converter.convert(record) for record in records]
    outcomes: list[Any] = [None] * len(drafts)
    answers: dict[int, list[Encoded] | None] = dict.fromkeys(range(len(drafts)))
    # A pair yields texts twice, so there are rounds: each encodes the waiting texts of all rows.
    while answers:
        asked: dict[int, list[Piece]] = {}
        for i, answer in answers.items():
            try:
                asked[i] = next(drafts[i]) if answer is None else drafts[i].send(answer)
            except StopIteration as end:
                outcomes[i] = end.value
            except (InvalidRow, UserError) as error:
                outcomes[i] = error
        encoded = iter(converter.tokenizer.encode_pieces([piece for pieces in asked.values() for piece in pieces]))
        answers = {i: list(islice(encoded, len(pieces))) for i, pieces in asked.items()}
    return outcomes
