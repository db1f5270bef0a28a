"""Deltas of weights: the values that changed since the last sync, with their places.

A step of RL leaves most bfloat16 weights as they were, because it is smaller than half the distance to the next number.
With `weight_sync.delta` sender and receiver keep the values of the last sync, and a bucket is sent in code: a bucket
again, in which each name begins with its form.

    =NAME   all values of the tensor, in its dtype and shape
    +NAME   uint8: the places that changed, and their new values
    ^NAME   uint8: the places that changed, and old XOR new value, where that is smaller

A delta is 9 bytes of head, the gaps between the places and the values. Gaps are distances from the place before (the
first from -1) in 1, 2, 4 or 8 bytes each. Gaps and values are split into planes of bytes (all first bytes, all second
bytes, ..), because high bytes repeat, and compressed by zlib. A tensor whose delta would be larger than itself is sent
whole.

Example: [1, 2, 3, 4] was sent before and is [1, 5, 3, 6] now. Gaps 2, 2; values 5, 6.

What the engine loads is whole again, and its checksums are compared with those of the trainer's tensors: a wrong
delta cannot go unnoticed (fingerprint.py).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import RunStopped
from core.types.weights import Bucket

Coding = Literal["plain", "whole", "changes"]
"""Form of the tensors of a sync. plain: as they are, and nobody keeps them. whole: as they are, kept for the next
sync. changes: deltas to the kept ones."""

WHOLE, PLACES, XOR = "=", "+", "^"
_HEAD = struct.Struct("<qB")
"""Number of changed values, and bytes of a gap."""
_LEVEL = 1
"""Level of zlib: higher ones take many times as long for some percent."""
_GAPS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.int64}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Changes:
    """What changed in a sync, over all tensors."""

    values: int = 0
    """All values, changed or not."""
    changed: int = 0
    tensors: int = 0
    by_xor: int = 0
    """Tensors whose XOR was smaller than their new values."""


class DeltaEncoder:
    """Sender's end of the deltas, over all syncs of a run."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}
        self.coding: Coding = "plain"
        self.changes = Changes()

    def begin(self, coding: Coding) -> None:
        """Begin a sync."""
        self.coding, self.changes = coding, Changes()
        if coding != "changes":
            self._last = {}

    def encode(self, bucket: Bucket) -> Bucket:
        """Return a bucket in the form in which it is sent."""
        return bucket if self.coding == "plain" else [self._encode(name, tensor) for name, tensor in bucket]

    def _encode(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        bits = _bits_of(tensor)
        if self.coding == "whole":
            self._last[name] = bits.clone()
            return WHOLE + name, tensor
        last = self._last[name]
        places = (bits != last).nonzero()[:, 0]
        new, old = bits[places], last[places]
        last[places] = new
        as_values, as_xor = _pack(places, new, old ^ new)
        self.changes.values += bits.numel()
        self.changes.changed += len(places)
        self.changes.tensors += 1
        if min(len(as_values), len(as_xor)) >= tensor.nbytes:
            return WHOLE + name, tensor
        form, packed = (XOR, as_xor) if len(as_xor) < len(as_values) else (PLACES, as_values)
        self.changes.by_xor += form == XOR
        return form + name, torch.frombuffer(bytearray(packed), dtype=torch.uint8)


class DeltaDecoder:
    """Receiver's end of the deltas, over all syncs of a run."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def decode(self, bucket: Bucket) -> Bucket:
        """Return the whole tensors of a bucket, under their names. Tensors that are not in code stay as they are."""
        return [
            self._decode(name, tensor) if name[0] in (WHOLE, PLACES, XOR) else (name, tensor) for name, tensor in bucket
        ]

    def _decode(self, coded: str, tensor: Tensor) -> tuple[str, Tensor]:
        form, name = coded[0], coded[1:]
        if form == WHOLE:
            self._last[name] = tensor.detach().to("cpu", copy=True)
            return name, tensor
        if name not in self._last:
            raise RunStopped(f"changes of {name} came to an engine that has not received its values")
        last = self._last[name]
        bits = _bits_of(last)
        places, values = _unpack(tensor, bits.dtype)
        bits[places] = values if form == PLACES else bits[places] ^ values
        # a copy, because the consumer may keep or change it; NCCL delivers on the GPU
        return name, last.to(tensor.device, copy=True)


def _bits_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as integers [n] on the CPU, sharing its memory if it is contiguous and there."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _pack(places: Tensor, *choices: Tensor) -> list[bytes]:
    """Return a delta for each choice of values at the places, whose gaps are compressed once."""
    gaps = np.diff(places.numpy(), prepend=-1)
    widest = int(gaps.max(initial=0))
    width = next(width for width, kind in _GAPS.items() if widest <= np.iinfo(kind).max)
    begun = zlib.compressobj(_LEVEL)
    head = _HEAD.pack(len(gaps), width) + begun.compress(_split_planes(gaps.astype(_GAPS[width])))
    packed: list[bytes] = []
    for values in choices:
        own = begun.copy()
        packed.append(head + own.compress(_split_planes(values.numpy())) + own.flush())
    return packed


def _unpack(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return places int64 [n] and values [n] of a delta."""
    data = packed.cpu().numpy().tobytes()
    n, width = _HEAD.unpack_from(data)
    body = zlib.decompress(data[_HEAD.size :])
    gaps = _join_planes(body[: n * width], n, np.dtype(_GAPS[width]))
    values = _join_planes(body[n * width :], n, np.dtype(str(dtype).removeprefix("torch.")))
    places = np.cumsum(gaps, dtype=np.int64) - 1
    return torch.from_numpy(places), torch.from_numpy(values)


def _split_planes(values: NDArray[np.generic]) -> bytes:
    """Return the first bytes of all values, then their second bytes, and so on."""
    return values.view(np.uint8).reshape(len(values), values.itemsize).T.tobytes()


def _join_planes(data: bytes, n: int, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Return the `n` values of the planes, in memory of their own."""
    planes = np.frombuffer(data, dtype=np.uint8).reshape(dtype.itemsize, n)
    return planes.T.copy(order="C").view(dtype).reshape(n)
