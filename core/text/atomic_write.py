"""Write files so that a reader finds the whole of them or what was there before, and know what a folder holds."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from core.errors import writing

PARTIAL = ".partial"
"""End of the name of what is being written, maybe by a run that was killed: it is never read."""


@contextmanager
def replacing(path: Path, *, meaning: str = "") -> Generator[Path]:
    """Yield another name under which the body writes a file; then flush that to the disk, and rename it.

    Raises RunStopped where that fails; see core.errors.writing.
    """
    partial = path.with_name(path.name + PARTIAL)
    with writing(path, meaning=meaning):
        yield partial
        flush_path(partial)
        os.replace(partial, path)


def write_whole(path: Path, text: str, *, meaning: str = "") -> None:
    """Write a text file as `replacing` does."""
    with replacing(path, meaning=meaning) as partial:
        partial.write_text(text, encoding="utf-8")


def flush_path(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    """Write everything below `folder` to the disk, folders last."""
    for path in [*_walk(folder), folder]:
        flush_path(path)


def measure_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file below `folder`, by its path there."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(_walk(folder)) if p.is_file()}


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _walk(path)
        yield path
