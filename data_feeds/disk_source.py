"""Disk source: rows are read from disk and converted when they are drawn.

An invalid row is replaced by the next valid row of the file, so that an item is a function of the row's number. Rows of
the next steps are converted by a thread in the background; the tokenizer encodes them all in one call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from configs.data_schema import DataConfig
from core.errors import RunStopped, UserError
from data_feeds.rows.disk_rows import DiskRows
from data_feeds.rows.find_form import PROBED
from data_feeds.rows.form_settings import plan_checked
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.open_rows import open_disk_rows
from data_feeds.rows.read_source import convert_batch
from data_feeds.rows.row_types import RowConverter
from data_feeds.rows.run_samples import list_sample_files
from data_feeds.rows.sources import RecordPlan
from data_feeds.source import Item, Source

CHECKED = 1000
"""Rows that are converted before the start, the first that are drawn; and rows after which too many invalid ones stop
the run."""
TRIES = 100
"""Rows that are tried in place of an invalid one."""
_ENCODING = threading.Lock()
"""Held while rows are converted: sources share a tokenizer, which is used by one thread at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSource(Source[Item]):
    """Rows of a data set on disk. `items` are the first that are drawn."""

    is_lazy: ClassVar[bool] = True
    disk: DiskRows
    plan: RecordPlan
    converter: RowConverter
    max_invalid_fraction: float
    ahead: dict[int, Future[dict[int, Any]]] = field(default_factory=dict[int, "Future[dict[int, Any]]"])
    """Rows that are converted in the background, each with the future of its batch."""
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rows"))
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rows(self) -> int:
        return len(self.disk)

    @property
    def digest(self) -> str | None:
        return self.disk.digest

    def pick(self, nth: int) -> int:
        if self.replacement:
            return super(DiskSource, self).pick(nth)
        return self.disk.pick(self.stream, nth)

    def read(self, row: int) -> Item:
        """Return a row, or the next valid row in the file. Raises RunStopped if too many are invalid."""
        batch = self.ahead.pop(row, None)
        found = self.convert([row])[row] if batch is None else batch.result()[row]
        for place in range(row + 1, row + 1 + TRIES):
            if not isinstance(found, InvalidRow):
                break
            place %= self.rows
            found = self.convert([place], are_drawn=False)[place]
        if isinstance(found, InvalidRow):
            raise RunStopped(f"{self.converter.key}: {TRIES} rows from row {row} on are invalid: {self.invalid}")
        return found

    def prepare(self, nths: Sequence[int]) -> None:
        rows = [row for row in map(self.pick, nths) if row not in self.ahead]
        if rows:
            batch = self.background.submit(self.convert, rows)
            self.ahead.update(dict.fromkeys(rows, batch))

    def convert(self, rows: Sequence[int], *, are_drawn: bool = True) -> dict[int, Any]:
        """Return the item or the InvalidRow of each row. Raises RunStopped if too many drawn rows are invalid.

        are_drawn: count the rows. Rows tried in place of a drawn one are not counted: of invalid rows side by side,
        each draw would count all that follow.
        """
        outcomes: dict[int, Any] = {}
        records = {}
        for row in rows:
            try:
                records[row] = self.plan.make(self.disk.read(row), row)
            except InvalidRow as found:
                outcomes[row] = found
        with _ENCODING:
            converted = convert_batch([*records.values()], self.converter)
        outcomes |= dict(zip(records, converted, strict=True))
        with self.lock:
            for row, outcome in outcomes.items():
                self.invalid.looked_at += are_drawn
                if isinstance(outcome, UserError):
                    raise outcome
                if are_drawn and isinstance(outcome, InvalidRow):
                    self.invalid.add(str(row), outcome)
            if self.invalid.looked_at >= CHECKED and self.invalid.share > self.max_invalid_fraction:
                raise RunStopped(
                    f"{self.converter.key}: {self.invalid.rows} of {self.invalid.looked_at} drawn rows are invalid, a "
                    f"larger fraction than data.max_invalid_fraction={self.max_invalid_fraction:g}: {self.invalid}"
                )
        return outcomes


def _read_first(disk: DiskRows) -> Iterator[dict[str, Any]]:
    """Yield the first rows of the file that can be parsed."""
    for row in range(min(len(disk), PROBED)):
        # the others are counted as invalid when they are drawn
        with suppress(InvalidRow):
            yield disk.read(row)


def open_source(
    disk: DiskRows, converter: RowConverter, stream: str, *, max_invalid_fraction: float, most: int | None
) -> Source[Any]:
    """Return the source of rows on disk, with the first draws checked. Raises UserError if too few are valid.

    most: number of rows to check, those at the beginning of the file; None: the first CHECKED draws.
    """
    key, n = converter.key, len(disk)
    read, plan = plan_checked(converter, list(_read_first(disk)))
    source: DiskSource[Any] = DiskSource(
        name=converter.source.log_name,
        items=[],
        stream=stream,
        replacement=converter.source.replacement,
        form=read.fit.name,
        notes=[f"{key}: {n:,} {disk.kind}; they are read when they are drawn (lazy)", *read.notes],
        disk=disk,
        plan=plan,
        converter=converter,
        max_invalid_fraction=1.0,
    )
    if most is not None:
        rows = [*range(min(n, 10 * most))]
    else:  # with replacement a row may be drawn twice
        rows = [*dict.fromkeys(source.pick(nth) for nth in range(min(n, CHECKED)))]
    outcomes = source.convert(rows)
    items = [item for item in outcomes.values() if not isinstance(item, InvalidRow)][:most]
    looked_at = f"the first {source.invalid.looked_at} rows that are drawn"
    source.invalid.check(key, looked_at, has_valid=bool(items), most=max_invalid_fraction)
    source.items.extend(items)
    return replace(source, max_invalid_fraction=max_invalid_fraction)


def open_lazy(data: DataConfig, converter: RowConverter, stream: str, *, most: int | None) -> Source[Any] | None:
    """Return a source of `data.train` if it is lazy, and None if not. Raises UserError if it cannot be read so."""
    source, key = converter.source, converter.key
    if converter.row_type.kind == "prompts" and list_sample_files(source.path):
        if source.lazy is True:
            raise UserError(f"{key} is a recorded run, whose groups are put together before the start: set lazy: false")
        return None
    disk = open_disk_rows(source, key)
    if disk is None:
        return None
    if data.held_out_rows:
        raise UserError(
            f"{key} is lazy, and data.eval.from_train reads all rows to hold some out: name another source "
            "in data.eval, or set lazy: false for this one"
        )
    return open_source(disk, converter, stream, max_invalid_fraction=data.max_invalid_fraction, most=most)
