"""Rows of a file on disk, found by an index and read when they are drawn.

The order of the draws is a function of the seed and of the file's layout, and needs no memory. JSONL and data sets of
Arrow are shuffled as a whole. A single row of Parquet costs its row group, so there whole groups are shuffled, and the
rows within windows of about WINDOW rows of them.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from core.errors import MIB, UserError, first_line
from core.text.text_files import parse_json, read_ends
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.line_index import index_lines
from data_feeds.rows.mixture import pick_row
from data_feeds.rows.permute import permute

Row = dict[str, Any]
WHOLE_SHUFFLE = 1_000_000
"""Rows up to which a pass is shuffled in memory, as for rows that were read before the start."""
WINDOW = 20_000
"""Least number of rows of Parquet that are shuffled together."""
LARGEST_GROUP = 50_000
"""Largest row group of Parquet, in rows: two windows are held in memory."""


class DiskRows(Protocol):
    """Rows of a source, by number."""

    digest: str
    """Hash of size, both ends and index of the file, to notice a change at a resume."""
    kind: str
    """Name of the kind of rows and of the quality of the shuffle, for the start of a run."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> Row:
        """Return a row. Raises InvalidRow for one that cannot be parsed."""
        ...

    def pick(self, stream: str, draw: int) -> int:
        """Return the row of a draw. Every pass has each row once."""
        ...


class JsonlRows:
    """Rows of a JSONL file by the offsets of its lines."""

    kind = "lines of JSONL, shuffled as a whole"

    def __init__(self, path: Path, key: str):
        self.key = key
        self.starts = index_lines(path)
        if not len(self.starts):
            raise UserError(f"{key} has no rows")
        with path.open("rb") as file:
            self.text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.digest = hash_file_ends(path, self.starts)

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, row: int) -> Row:
        end = int(self.starts[row + 1]) if row + 1 < len(self.starts) else len(self.text)
        line = self.text[int(self.starts[row]) : end]
        try:
            found = parse_json(line.decode("utf-8-sig"), f"{self.key}, row {row}")
        except (UserError, UnicodeDecodeError) as error:
            raise InvalidRow("bad_text", f"it is no JSON: {first_line(error)}") from error
        if not isinstance(found, dict):
            raise InvalidRow("bad_text", f"it is not a JSON object, found {found!r:.60}")
        return found

    def pick(self, stream: str, draw: int) -> int:
        return shuffle_whole(stream, draw, len(self))


class DatasetRows:
    """Rows of a datasets.Dataset, which maps its Arrow files into memory."""

    kind = "rows of Arrow, shuffled as a whole"

    def __init__(self, rows: Any):
        # as they are stored: datasets would decode images, and the repr of one has an address
        self.rows = rows.with_format("arrow")
        names = "".join(sorted(str(file) for file in rows.features))
        # the ends tell of a folder that was written again
        ends = f"{self.read(0)!r}{self.read(len(rows) - 1)!r}"
        self.digest = hashlib.blake2b(f"{len(rows)} {names} {ends}".encode(), digest_size=32).hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int) -> Row:
        return self.rows[row].to_pylist()[0]

    def pick(self, stream: str, draw: int) -> int:
        return shuffle_whole(stream, draw, len(self))


class ArrowRows:
    """Rows of an Arrow file or stream, which is mapped into memory."""

    kind = "rows of Arrow, shuffled as a whole"

    def __init__(self, path: Path, key: str):
        import pyarrow

        self.file = pyarrow.memory_map(str(path))
        self.batches: list[Any] = []
        allocated = pyarrow.total_allocated_bytes()
        try:
            for batch in _read_batches(self.file):
                self.batches.append(batch)
                # batches that are mapped take no memory
                if pyarrow.total_allocated_bytes() - allocated > max(MIB, batch.nbytes // 2):
                    raise UserError(
                        f"{key} is compressed, so it cannot be mapped into memory: write it with "
                        "datasets.save_to_disk or as Parquet, or set lazy: false for the source"
                    )
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{key} cannot be read as Arrow: {first_line(error)}") from error
        self.starts = [0, *accumulate(batch.num_rows for batch in self.batches)]
        if not len(self):
            raise UserError(f"{key} has no rows")
        self.digest = hash_file_ends(path, np.array(self.starts, dtype=np.uint64))

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, row: int) -> Row:
        batch = bisect_right(self.starts, row) - 1
        return self.batches[batch].slice(row - self.starts[batch], 1).to_pylist()[0]

    def pick(self, stream: str, draw: int) -> int:
        return shuffle_whole(stream, draw, len(self))


def _read_batches(file: Any) -> Iterator[Any]:
    """Yield the record batches of an Arrow file, or of a stream as datasets writes it."""
    import pyarrow

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file:
        yield from pyarrow.ipc.open_stream(file)
        return
    reader = pyarrow.ipc.open_file(file)
    yield from (reader.get_batch(i) for i in range(reader.num_record_batches))


class ParquetRows:
    """Rows of a Parquet file, read by row groups."""

    def __init__(self, path: Path, key: str):
        import pyarrow.parquet

        self.file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        groups = range(self.file.metadata.num_row_groups)
        self.sizes = [self.file.metadata.row_group(group).num_rows for group in groups]
        if not sum(self.sizes):
            raise UserError(f"{key} has no rows")
        if max(self.sizes) > LARGEST_GROUP:
            raise UserError(
                f"{key} has a row group of {max(self.sizes)} rows, and a row is read with its group: write it with "
                f"groups of at most {LARGEST_GROUP} rows (python -m data_prep.regroup {path} --out NEW), or set lazy: "
                "false for the source to read all rows before the start"
            )
        self.starts = [0, *accumulate(self.sizes)]
        self.per_window = -(-WINDOW // max(self.sizes))
        self.kind = f"row groups of Parquet, shuffled within windows of {self.per_window} groups in random order"
        self.digest = hash_file_ends(path, np.array(self.starts, dtype=np.uint64))
        self._held: OrderedDict[int, list[Row]] = OrderedDict()
        self._lock = threading.Lock()  # the file is read by one thread at a time

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, row: int) -> Row:
        group = bisect_right(self.starts, row) - 1
        with self._lock:
            if group not in self._held:
                self._held[group] = self.file.read_row_group(group).to_pylist()
                # two windows: the next begins before the last of this one is drawn
                while len(self._held) > 2 * self.per_window:
                    self._held.popitem(last=False)
            self._held.move_to_end(group)
            return self._held[group][row - self.starts[group]]

    def pick(self, stream: str, draw: int) -> int:
        nth, place = divmod(draw, len(self))
        order, begins = _order_groups(tuple(self.sizes), self.per_window, f"{stream}/{nth}")
        window = bisect_right(begins, place) - 1
        groups = order[window * self.per_window : (window + 1) * self.per_window]
        inside = permute(place - begins[window], begins[window + 1] - begins[window], f"{stream}/{nth}/{window}")
        for group in groups:
            if inside < self.sizes[group]:
                return self.starts[group] + inside
            inside -= self.sizes[group]
        raise AssertionError("a window has as many rows as its groups")


@lru_cache(maxsize=16)
def _order_groups(sizes: tuple[int, ...], per_window: int, key: str) -> tuple[list[int], list[int]]:
    """Return the row groups in the order of a pass, and the first draw of each window; [windows + 1]."""
    order = [permute(i, len(sizes), f"{key}/groups") for i in range(len(sizes))]
    windows = [order[i : i + per_window] for i in range(0, len(order), per_window)]
    return order, [0, *accumulate(sum(sizes[group] for group in window) for window in windows)]


def shuffle_whole(stream: str, draw: int, rows: int) -> int:
    """Return the row of a draw from a shuffle of all rows. Small sets are shuffled as without an index."""
    if rows <= WHOLE_SHUFFLE:
        return pick_row(stream, draw, rows)
    nth, place = divmod(draw, rows)
    return permute(place, rows, f"{stream}/{nth}")


def hash_file_ends(path: Path, index: NDArray[np.uint64]) -> str:
    """Hash the size, the first and the last MiB, and the index of a file."""
    found = hashlib.blake2b(f"{path.stat().st_size}".encode(), digest_size=32)
    found.update(read_ends(path, MIB))
    found.update(index.data)
    return found.hexdigest()
