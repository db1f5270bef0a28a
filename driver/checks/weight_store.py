"""Folder or object store of weights (`weight_sync.folder`): checked at the start by writing an object."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from configs.schema import RLConfig, RunConfig
from core.errors import TransportFailed, UserError
from core.stores import is_remote
from trainers.weight_sync.store import read_chunk_bytes, remove_folder, write_chunk


def locate_folder(folder: str) -> str:
    """Return the address without a slash at the end; a path is made absolute, for other processes work elsewhere."""
    return folder.rstrip("/") if is_remote(folder) else str(Path(folder).absolute())


def check_weight_store(cfg: RunConfig) -> None:
    """Raise UserError if no weights can be written to weight_sync.folder, read there and removed."""
    if not isinstance(cfg, RLConfig) or cfg.weight_sync.folder is None:
        return
    key, folder = f"weight_sync.folder={cfg.weight_sync.folder}", locate_folder(cfg.weight_sync.folder)
    if folder.startswith("memory://"):
        raise UserError(
            f"{key} is in the memory of one process, and trainers and engines are others: name a path or a store, "
            "such as s3://BUCKET/FOLDER"
        )
    tried = f"{folder}/check-{uuid4().hex}"  # runs on several machines may start at once
    try:
        chunk = write_chunk(tried, "object", b"weights")
        try:
            read_chunk_bytes(chunk)
        except TransportFailed:
            with suppress(TransportFailed):  # the first error says more
                remove_folder(tried)
            raise
        remove_folder(tried)
    except TransportFailed as error:
        reason = str(error).partition("over disk: ")[2]
        raise UserError(f"{key}: {reason}: name a folder that may be written to, read and cleared") from error
