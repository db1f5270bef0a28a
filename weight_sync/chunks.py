"""Weights bucket by bucket through the driver's hands: as bytes in Ray's object store, or as files that all can read.

Slower than a broadcast, and in need of nothing but what the run has anyway. Trainer ranks make parcels with a
`Packer`, one at a time; engines `unpack` each. Whoever drives (weight_sync/transports.py) never looks into one.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from safetensors.torch import load, save

from weight_sync.base import Bucket, Sent, carrying
from weight_sync.fingerprint import fingerprint

Parcel = bytes | str
"""A bucket in safetensors format, or the path of a file of that."""


class Packer:
    """One rank's end of one sync. Every rank goes through the stream, where gathering takes them all; one packs."""

    parcel: Parcel
    """Of the last bucket."""

    def __init__(self, stream: Generator[Bucket], *, packs: bool, folder: str | None):
        """folder: write files there instead of keeping bytes."""
        self._stream, self._packs, self._folder = stream, packs, folder
        self._checksums: dict[str, int] = {}
        self._nbytes = self._count = 0

    def pack(self) -> bool:
        """Make the next parcel, and forget the one before; False at the end of the stream."""
        bucket = next(self._stream, None)
        if bucket is None:
            return False
        if self._packs:
            self._checksums |= fingerprint(bucket)
            self._nbytes += sum(tensor.nbytes for _, tensor in bucket)
            with carrying("disk" if self._folder else "direct"):
                self._wrap(bucket)
        self._count += 1
        return True

    def close(self) -> None:
        """Go no further: what was gathered for the stream's last bucket is let go of."""
        self._stream.close()

    def sent(self) -> Sent:
        return Sent(checksums=self._checksums, nbytes=self._nbytes)

    def _wrap(self, bucket: Bucket) -> None:
        packed = save({name: tensor.cpu().contiguous() for name, tensor in bucket})
        if self._folder is None:
            self.parcel = packed
            return
        file = Path(self._folder) / f"{self._count}.safetensors"
        file.write_bytes(packed)
        if self._count:
            Path(self.parcel).unlink()  # every engine has read it
        self.parcel = str(file)


def unpack(parcel: Parcel) -> Bucket:
    if isinstance(parcel, str):
        with carrying("disk"):
            return list(load(Path(parcel).read_bytes()).items())  # no mapping: the file goes before the tensors do
    with carrying("direct"):
        return list(load(parcel).items())
