"""Weights in a folder or an object store (weight_sync.transport: disk).

Each sync has a folder of its own, with a chunk per object. The manifest is written last, so an engine that finds it
finds every chunk; each is compared with the size and the hash in it.

    FOLDER/12-5f0c9a1e/0.safetensors
    FOLDER/12-5f0c9a1e/1.safetensors
    FOLDER/12-5f0c9a1e/manifest.json    {"chunks": ["0.safetensors#67108864-9b74...", ...]}
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from core.errors import TransportFailed, UserError, first_line, name_error
from core.stores import StoreUnreachable, find_cause, open_store

T = TypeVar("T")
MANIFEST = "manifest.json"
WAITS_S = (0.5, 1.0, 2.0)
"""Seconds before each further attempt to read or write an object."""


def write_chunk(folder: str, name: str, data: bytes) -> str:
    """Write a chunk. Return the address with size and hash, as `read_chunk_bytes` takes it."""
    _retry(lambda: _pipe(f"{folder}/{name}", data), f"write {name} to {folder}")
    return f"{folder}/{name}#{len(data)}-{hashlib.sha256(data).hexdigest()}"


def read_chunk_bytes(chunk: str) -> bytes:
    """Read a chunk. Raises TransportFailed unless it is what was written."""
    address, _, mark = chunk.rpartition("#")
    nbytes, _, digest = mark.partition("-")

    def read() -> bytes:
        data = _cat(address)
        if len(data) != int(nbytes):
            raise _Incomplete(f"it has {len(data):,} of {int(nbytes):,} bytes")
        if hashlib.sha256(data).hexdigest() != digest:
            raise _Incomplete("its hash is another than when it was written")
        return data

    return _retry(read, f"read {address}")


def write_manifest(folder: str, chunks: Sequence[str]) -> None:
    """List the chunks of a sync, when all are written."""
    listed = [chunk.removeprefix(f"{folder}/") for chunk in chunks]
    _retry(lambda: _pipe(f"{folder}/{MANIFEST}", json.dumps({"chunks": listed}).encode()), f"write to {folder}")


def read_manifest(folder: str) -> list[str]:
    """Return the chunks of a sync, as `read_chunk_bytes` takes them. Raises TransportFailed if it is not complete."""
    found = _retry(lambda: json.loads(_cat(f"{folder}/{MANIFEST}")), f"read {folder}/{MANIFEST}")
    return [f"{folder}/{name}" for name in found["chunks"]]


def remove_folder(folder: str) -> None:
    """Remove a folder with all objects below it, if there is any. Raises TransportFailed."""

    def remove() -> None:
        store, path = _open(folder)
        store.invalidate_cache()  # another process has written there
        if store.exists(path):
            store.rm(path, recursive=True)

    _retry(remove, f"remove {folder}")


class _Incomplete(Exception):
    """Object that is not what was written; a later read may find it whole."""


def _open(address: str) -> tuple[Any, str]:
    store, path = open_store(address, f"weight_sync.folder={address}")
    if "file" in store.protocol:
        store.auto_mkdir = True  # object stores have no folders to make
    return store, path


def _pipe(address: str, data: bytes) -> None:
    store, path = _open(address)
    store.pipe_file(path, data)


def _cat(address: str) -> bytes:
    store, path = _open(address)
    return store.cat_file(path)


def _retry(call: Callable[[], T], what: str) -> T:
    """Call until it succeeds, with pauses. Raises TransportFailed after the last, or if another would fail, too."""
    for wait_s in (*WAITS_S, None):
        try:
            return call()
        except Exception as error:  # a border: each store raises errors of its own
            if isinstance(error, UserError) and not isinstance(error, StoreUnreachable):
                raise  # no such protocol, or no package for it
            reason = explain_failure(error)
            if wait_s is None or reason:
                said = reason or name_error(find_cause(error))
                raise TransportFailed(f"weights did not get through over disk: cannot {what}: {said}") from error
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def explain_failure(error: BaseException) -> str:
    """Return the reason, as a clause, why no further attempt at a store would help, or "" if one may."""
    if isinstance(error, NotImplementedError):
        return "this kind of store takes no objects"
    cause: BaseException | None = error
    while cause is not None:  # a store may wrap the error of its library, or be wrapped by it
        if isinstance(cause, PermissionError) or getattr(cause, "status", None) in (401, 403):
            return f"access is denied ({first_line(cause)})"
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return "there is no room left"
        if "NoSuchBucket" in str(cause) or "bucket does not exist" in str(cause):
            return "there is no such bucket"
        cause = cause.__cause__
    return ""
