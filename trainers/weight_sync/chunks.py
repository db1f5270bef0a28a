"""Weights in chunks through the driver: as bytes in Ray's object store, or as files that all machines can read.

This is slower than a broadcast, but needs no process group. Every trainer rank runs a
`ChunkWriter`, which makes one chunk at a time; engines read each with `read_chunk`. The driver
(trainers/weight_sync/transports.py) passes chunks on without looking into them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

from safetensors.torch import load, save

from core.types.weights import Bucket
from trainers.weight_sync.base import Chunk, Sent, transfer_errors
from trainers.weight_sync.fingerprint import fingerprint


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
        """folder: write files there; None keeps bytes. encode: the form in which a bucket is sent; see delta.py."""
        self._stream, self._writes, self._folder, self._encode = stream, writes, folder, encode
        self._checksums: dict[str, int] = {}
        self._nbytes = self._count = 0

    def write_chunk(self) -> bool:
        """Write the next chunk and drop the previous chunk; return False at the end of the stream."""
        bucket = next(self._stream, None)
        if bucket is None:
            return False
        if self._writes:
            self._checksums |= fingerprint(bucket)
            coded = self._encode(bucket)
            self._nbytes += sum(tensor.nbytes for _, tensor in coded)
            with transfer_errors("disk" if self._folder else "direct"):
                self._store(coded)
        self._count += 1
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
        file = Path(self._folder) / f"{self._count}.safetensors"
        file.write_bytes(packed)
        if self._count:
            Path(self.chunk).unlink()  # every engine has read it
        self.chunk = str(file)


def read_chunk(chunk: Chunk) -> Bucket:
    """Read the named tensors of a chunk. Raises TransportFailed."""
    if isinstance(chunk, str):
        with transfer_errors("disk"):
            return list(load(Path(chunk).read_bytes()).items())  # no mmap: the file is deleted before the tensors
    with transfer_errors("direct"):
        return list(load(chunk).items())
