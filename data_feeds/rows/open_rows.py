"""Open the rows of a lazy source."""

from __future__ import annotations

import os
from pathlib import Path

from configs.data_schema import SourceConfig
from core.errors import UserError
from data_feeds.rows.disk_rows import ArrowRows, DatasetRows, DiskRows, JsonlRows, ParquetRows
from data_feeds.rows.read_files import HUB, load_hub, load_saved

LARGE_BYTES = 2 * 2**30
"""Size above which a source with `lazy: auto` is lazy."""


def open_disk_rows(source: SourceConfig, key: str) -> DiskRows | None:
    """Return the rows of a lazy source; None if it is not lazy. Raises UserError for one that cannot be."""
    if source.lazy is False or (source.lazy == "auto" and not _is_large(source.path)):
        return None
    path = Path(source.path)
    if source.path.startswith(HUB):
        return DatasetRows(load_hub(source, key))
    if os.path.isdir(path):
        return DatasetRows(load_saved(path, source.split, key))
    if not os.path.isfile(path):
        raise UserError(f"{key}: there is no such file; the scripts in data_prep/ make one")
    match path.suffix:
        case ".jsonl":
            return JsonlRows(path, key)
        case ".parquet":
            return ParquetRows(path, key)
        case ".arrow" | ".feather":
            return ArrowRows(path, key)
        case _:
            raise UserError(
                f"{key}: lazy is true, and only .parquet, .jsonl (not packed), .arrow, folders of "
                "datasets.save_to_disk and data sets of the hub have an index: write one of them, or set lazy: false"
            )


def _is_large(path: str) -> bool:
    """Tell whether a source that may be lazy is larger than LARGE_BYTES."""
    if os.path.isdir(path):
        return sum(file.stat().st_size for file in Path(path).rglob("*.arrow")) > LARGE_BYTES
    return (
        path.endswith((".jsonl", ".parquet", ".arrow", ".feather"))
        and os.path.isfile(path)
        and os.path.getsize(path) > LARGE_BYTES
    )
