"""Offsets of the lines of a file, kept in the user's cache folder for large files.

A kept index counts only for a file of the same path, size, times, inode and ends, and only if it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.cache_folder import find_cache_folder
from core.errors import MIB, first_line
from core.text.text_files import read_ends
from core.timing.progress import say

CHUNK_BYTES = 16 * MIB
BLANKS = np.frombuffer(b" \t\r\v\f", dtype=np.uint8)
KEPT_BYTES = 256 * MIB
"""Size of a file from which the index is kept; a smaller one is read in a fraction of a second."""


def index_lines(path: Path) -> NDArray[np.uint64]:
    """Return the offsets of the lines of a file that are not blank, from the cache if they are there."""
    if path.stat().st_size < KEPT_BYTES:
        return find_lines(path)
    file = find_cache_folder("indices") / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    described = _describe(path)
    kept = _read_kept(file, described)
    if kept is not None:
        return kept
    starts = find_lines(path)
    # a file that somebody writes meanwhile has no index that could be kept
    if _describe(path) == described:
        _keep(file, described, starts)
    return starts


def find_lines(path: Path) -> NDArray[np.uint64]:
    """Return the offsets of the lines of a file that are not blank: those of CRLF files hold a carriage return."""
    ends, heads = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.uint8)]
    at, begins = 0, True
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            text = np.frombuffer(chunk, dtype=np.uint8)
            found = np.flatnonzero(text == ord("\n"))
            ends.append(found.astype(np.uint64) + np.uint64(at))
            # the first byte of each line: what follows the end of another, also of the chunk before
            begun = np.insert(found + 1, 0, 0) if begins else found + 1
            begins = chunk.endswith(b"\n")
            heads.append(text[begun[:-1] if begins else begun])
            at += len(chunk)
    stops = np.append(np.concatenate(ends), np.uint64(at))
    starts = np.insert(stops[:-1] + np.uint64(1), 0, np.uint64(0))
    # rows reach to the start of the next one: the white space of blank lines is no part of JSON
    is_row = stops > starts
    with path.open("rb") as file:
        for line in np.flatnonzero(np.isin(np.concatenate(heads), BLANKS)):
            file.seek(int(starts[line]))
            is_row[line] = bool(file.read(int(stops[line] - starts[line])).strip())
    return starts[is_row]


def _describe(path: Path) -> dict[str, int | str]:
    """Return all that tells whether a file is another than it was, without reading all of it."""
    told = path.stat()
    ends = hashlib.blake2b(read_ends(path, MIB), digest_size=32).hexdigest()
    return {
        "rows": "lines that are not blank",  # an index kept by an earlier version has other lines
        "path": str(path.resolve()),
        "size": told.st_size,
        "mtime_ns": told.st_mtime_ns,
        # unlike mtime, no program sets it
        "ctime_ns": told.st_ctime_ns,
        "inode": told.st_ino,
        "ends": ends,
    }


def _read_kept(file: Path, described: dict[str, int | str]) -> NDArray[np.uint64] | None:
    """Return the index that is kept for a file as described; None without one, or if it is damaged."""
    try:
        head, _, body = file.read_bytes().partition(b"\n")
        told = json.loads(head)
    except (OSError, ValueError):
        return None
    if told != described | {"digest": hashlib.blake2b(body, digest_size=32).hexdigest()}:
        return None
    return np.frombuffer(body, dtype=np.uint64)


def _keep(file: Path, described: dict[str, int | str], starts: NDArray[np.uint64]) -> None:
    body = starts.tobytes()
    head = json.dumps(described | {"digest": hashlib.blake2b(body, digest_size=32).hexdigest()})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as opened:
            opened.write(head.encode() + b"\n" + body)
        os.replace(partial, file)
    except OSError as error:
        say(f"the index of {described['path']} is not kept: {first_line(error)}; set FEYNRL_CACHE to another folder")
