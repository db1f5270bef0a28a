"""Write a Parquet file again with smaller row groups, so that a lazy source can read it.

python -m data_prep.regroup BIG.parquet --out NEW.parquet
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet

from core.errors import UserError, first_line
from core.text.atomic_write import replacing
from data_prep.script import run_script, whole


def regroup(source: Path, out: Path, rows: int) -> int:
    """Write the rows of a Parquet file in groups of `rows`; return their number. Raises UserError otherwise."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with _reading(source):
        file = pyarrow.parquet.ParquetFile(source)
    with file, replacing(out) as partial, pyarrow.parquet.ParquetWriter(partial, file.schema_arrow) as writer:
        batches = file.iter_batches(batch_size=rows)
        while (batch := _read_next(batches, source)) is not None:
            writer.write_batch(batch, row_group_size=rows)
        return file.metadata.num_rows


def _read_next(batches: Iterator[pyarrow.RecordBatch], source: Path) -> pyarrow.RecordBatch | None:
    with _reading(source):
        return next(batches, None)


@contextmanager
def _reading(source: Path) -> Generator[None]:
    try:
        yield
    # a damaged page is an OSError
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{source} cannot be read as Parquet: {first_line(error)}") from error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.regroup", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="Parquet file to read")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--rows", type=whole(1), default=1000, help="rows of a group (1000)")
    args = parser.parse_args()
    if args.out.resolve() == args.source.resolve():
        raise UserError("--out is the file that is read: name another")
    print(f"{args.out}: {regroup(args.source, args.out, args.rows):,} rows in groups of {args.rows}")


if __name__ == "__main__":
    run_script(main)
