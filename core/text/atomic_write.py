"""Atomic file writes, flushes to disk, and file sizes of a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from core.errors import PARTIAL as PARTIAL
from core.errors import writing


@contextmanager
def replacing(path: Path, *, meaning: str = "", needs: Callable[[], int] = lambda: 0) -> Generator[Path]:
    """Yield a temporary path for the body to write; then flush it to disk and rename it to `path`.

    Raises RunStopped if that fails; see core.errors.writing.
    """
    # In the same folder, because a rename is atomic only within one file system.
    partial = path.with_name(path.name + PARTIAL)
    try:
        with writing(path, meaning=meaning, needs=needs):
            yield partial
            # Without the flush, a power failure after the rename can leave an empty file under the final name.
            flush_path(partial)
            os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # it may be what filled the disk
            partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str, *, meaning: str = "") -> None:
    """Write a text file atomically; see `replacing`."""
    data = text.encode()
    with replacing(path, meaning=meaning, needs=lambda: len(data)) as partial:
        partial.write_bytes(data)


def append_lines(file: FileIO, lines: bytes) -> None:
    """Write lines at the end of an unbuffered file. If that fails, the whole lines that fit stay."""
    start, done = file.tell(), 0
    try:
        # A short write is no error of its own: the next one, of the rest, is.
        while done < len(lines):
            done += file.write(lines[done:]) or 0
    except OSError:
        file.truncate(start + lines.rfind(b"\n", 0, done) + 1)
        raise


def flush_path(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    # Read-only, because a folder cannot be opened for writing; fsync needs no more.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    """Flush everything below `folder` to disk, folders last."""
    # A folder's flush stores the names of its files, so it follows them.
    for path in [*_walk(folder), folder]:
        flush_path(path)


def measure_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file below `folder`, by relative path."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(_walk(folder)) if p.is_file()}


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _walk(path)
        yield path
