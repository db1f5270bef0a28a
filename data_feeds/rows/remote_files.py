"""Copies of files in object stores and on web servers, read through fsspec.

A file is downloaded once per version. A version is told by the size, the time and the hash that the store reports; a
store that reports none of the latter two is downloaded from at every start, for its file may have changed. Such a copy
is removed at the end of the process; the others are kept for later runs.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from configs.data_schema import SourceConfig
from core.cache_folder import find_cache_folder
from core.errors import MIB, UserError, first_line, name_error
from core.stores import find_cause, is_remote, open_store
from core.timing.progress import Progress, say

VERSION_KEYS = (
    *("ETag", "etag", "Content-MD5", "md5Hash", "crc32c", "content_settings", "blob_id", "lfs", "Last-Modified"),
    *("LastModified", "last_modified", "mtime", "updated", "created", "generation", "version_id", "VersionId"),
)
"""Keys of a store's description of a file that change with the content."""


def fetch_source(source: SourceConfig, key: str) -> SourceConfig:
    """Return the source with the path of a local copy, if the path is remote. Raises UserError if it cannot be read."""
    if not is_remote(source.path):
        return source
    return source.model_copy(update={"path": str(fetch(source.path, key))})


def fetch(url: str, key: str) -> Path:
    """Return the path of a local copy of a remote file, or of a folder of save_to_disk."""
    store, path = open_store(url, key)
    try:
        found = _describe(store, path)
    except Exception as error:  # a border: each store raises errors of its own
        cause = find_cause(error)
        if isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) == 404:
            raise UserError(f"{key}: there is no such file in the store") from error
        raise UserError(f"{key} cannot be reached: {name_error(cause)}") from error
    mark = _find_version(found)
    of_url = find_cache_folder("files") / hashlib.sha256(url.encode()).hexdigest()[:16]
    name = PurePosixPath(url.split("?")[0].rstrip("/")).name
    # a file without a mark gets a folder for each start, since another run may read the copy of an earlier one
    copy = of_url / (mark or f"unmarked-{os.getpid()}-{time.time_ns()}") / name
    if mark is None:
        atexit.register(_remove_copy, copy.parent, os.getpid())
    if mark is not None and copy.exists():
        say(f"{key}: read from the copy in {copy.parent}")
        return copy
    if mark is None:
        say(f"{key}: the store tells neither time nor hash of the file, so this copy is for this start only")
    total = sum(int(one.get("size") or 0) for one in found.values())
    say(f"{key}: downloading {total / MIB:,.1f} MiB to {copy.parent}")
    # complete before it has the name: another run may look for it meanwhile
    try:
        of_url.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=of_url, prefix="partial-"))
    except OSError as error:
        raise UserError(
            f"{key}: no copy can be written to {of_url}: {first_line(error)}; set FEYNRL_CACHE to another folder"
        ) from error
    try:
        _download(store, path, found, partial / name, Progress(key, total, "bytes downloaded"), key)
        put_in_place(partial, copy.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return copy


def _describe(store: Any, path: str) -> dict[str, dict[str, Any]]:
    """Return the description of a file, or of each file of a folder, by path."""
    info = store.info(path)
    if info["type"] != "directory":
        return {path: info}
    found: dict[str, dict[str, Any]] = store.find(path, detail=True)
    if not found:
        raise FileNotFoundError(path)
    return found


def _find_version(found: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a hash of the marks of all files; None if the store gives only sizes."""
    marks = {path: [(k, str(info[k])) for k in VERSION_KEYS if info.get(k)] for path, info in found.items()}
    if not all(marks.values()):
        return None
    told = [(path, info.get("size"), marks[path]) for path, info in sorted(found.items())]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _download(
    store: Any, path: str, found: Mapping[str, Mapping[str, Any]], to: Path, progress: Progress, key: str
) -> None:
    from fsspec.callbacks import Callback

    class Show(Callback):
        def relative_update(self, inc: int = 1) -> None:
            self.value += inc
            progress.show(done + self.value)

    done = 0
    for remote, info in found.items():
        local = to if remote == path else to / PurePosixPath(remote).relative_to(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.get_file(remote, str(local), callback=Show())
        except Exception as error:  # a border: each store raises errors of its own
            raise UserError(f"{key} cannot be downloaded: {name_error(error)}") from error
        size = local.stat().st_size
        if info.get("size") is not None and size != info["size"]:
            raise UserError(f"{key}: {size:,} of {info['size']:,} bytes came, so it changed: start the run again")
        done += size


def _remove_copy(folder: Path, process: int) -> None:
    """Remove a copy that no later start reads. A fork of the process that made it leaves it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a complete copy its name, unless another run has done so."""
    try:
        os.replace(partial, folder)
    except OSError:
        # another run was faster, and its copy is of the same version
        if not folder.is_dir():
            raise
