"""Weights in chunks: as bytes in Ray's object store, or as objects in a folder or a store (store.py).

This is slower than a broadcast, but needs no process group. Every trainer rank runs a `ChunkWriter`, which makes one
chunk at a time; engines read each with `read_chunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from safetensors.torch import load, save

from core.types.weights import Bucket
from trainers.weight_sync.base import Chunk, Sent, transfer_errors
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.store import read_chunk_bytes, write_chunk, write_manifest


class ChunkWriter:
    """Writer of the chunks of one sync. Every rank consumes the stream, which gathers sharded tensors; one writes."""

    chunk: Chunk
    """Last chunk that was written."""

    def __init__(
        self,
        stream: Generator[Bucket],
        *,
        writes: bool,
        folder: str | None,
        encode: Callable[[Bucket], Bucket] = lambda bucket: bucket,
    ):
        """folder: address to write objects below; None keeps bytes. encode: how a bucket is sent; see delta.py."""
        self._stream, self._writes, self._folder, self._encode = stream, writes, folder, encode
        self._checksums: dict[str, int] = {}
        self._nbytes = 0
        self._stored: list[str] = []

    def write_chunk(self) -> bool:
        """Write the next chunk; return False at the end of the stream, when all are listed."""
        bucket = next(self._stream, None)
        if bucket is None:
            if self._writes and self._folder is not None:
                write_manifest(self._folder, self._stored)
            return False
        if self._writes:
            self._checksums |= fingerprint(bucket)
            coded = self._encode(bucket)
            self._nbytes += sum(tensor.nbytes for _, tensor in coded)
            with transfer_errors("disk" if self._folder else "direct"):
                self._store(coded)
        return True

    def close(self) -> None:
        """End the stream early and release the parameters gathered for its last bucket."""
        self._stream.close()

    def summarize(self) -> Sent:
        """Return checksums and size of everything written."""
        return Sent(checksums=self._checksums, nbytes=self._nbytes)

    def _store(self, bucket: Bucket) -> None:
        packed = save({name: tensor.cpu().contiguous() for name, tensor in bucket})
        if self._folder is None:
            self.chunk = packed
            return
        self.chunk = write_chunk(self._folder, f"{len(self._stored)}.safetensors", packed)
        self._stored.append(self.chunk)


def read_chunk(chunk: Chunk) -> Bucket:
    """Read the named tensors of a chunk. Raises TransportFailed."""
    with transfer_errors("disk" if isinstance(chunk, str) else "direct"):
        return list(load(read_chunk_bytes(chunk) if isinstance(chunk, str) else chunk).items())
