"""Checksums of the weights that vLLM's loaders write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from core.types.weights import Bucket
from rollouts.engines.vllm_support.patches import TorchDispatchMode
from trainers.weight_sync.fingerprint import checksum

# Checksums are sums modulo 2^64.
_WRAP = 1 << 64


@dataclass(frozen=True)
class _Source:
    """Received tensor, located by byte range in a storage."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int


class LoadTrace(TorchDispatchMode):
    """Dispatch mode that intercepts every copy from a received tensor, and checksums the written parameter.

    A loader copies the slice of its rank. The source address gives the position of the slice. So each checksum counts
    at the right position, and the ranks' sums add up to the sender's.
    """

    def __init__(self) -> None:
        super().__init__()
        # by storage; the weak reference frees the bytes, but prevents another storage from reusing the address
        self._sources: dict[int, tuple[StorageWeakRef, list[_Source]]] = {}
        self._written: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}

    def expect(self, bucket: Bucket) -> None:
        """Register tensors before loading. vLLM may keep them until a later bucket completes their layer."""
        for name, t in bucket:
            storage = t.untyped_storage()
            begin = t.storage_offset() * t.itemsize
            source = _Source(name, begin, begin + t.nbytes, tuple(t.shape), t.stride(), t.itemsize)
            reference = StorageWeakRef(storage)
            self._sources.setdefault(reference.cdata, (reference, []))[1].append(source)

    def consumed(self) -> dict[str, int]:
        """Return the summed checksums of each tensor, by name, for tensors that were loaded."""
        sums: dict[str, int] = {}
        for (name, _, _), value in self._written.items():
            sums[name] = (sums.get(name, 0) + value) % _WRAP
        return sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:  # meta: vLLM only counts elements
            self._find_source(*args[:2])
        return returned

    def _find_source(self, written: Tensor, copied: Tensor) -> None:
        _, sources = self._sources.get(StorageWeakRef(copied.untyped_storage()).cdata, (None, []))
        at = copied.storage_offset() * copied.itemsize
        for source in sources:
            # an empty slice (the rank needs no part of the tensor) is at the tensor's end
            if source.begin <= at < source.end or (copied.numel() == 0 and at == source.end):
                self._record_checksum(source, at, written, copied)
                return

    def _record_checksum(self, source: _Source, at: int, written: Tensor, copied: Tensor) -> None:
        # A loader may copy a view. With the strides of the source it is a slice; with others the elements have another
        # order, and their positions cannot be derived from the offset.
        same_strides = copied.dim() == len(source.shape) and all(
            size <= 1 or mine == its
            for size, mine, its in zip(copied.shape, copied.stride(), source.stride, strict=True)
        )
        if not same_strides:  # reshaped or transposed on the way: use the checksum of the source tensor
            offset = copied.storage_offset() - (at - source.begin) // source.itemsize
            self._written[source.name, (), ()] = checksum(copied.as_strided(source.shape, source.stride, offset))
            return
        start, offset = [], (at - source.begin) // source.itemsize
        # The offset of the slice's first element, divided by the strides from the outermost dimension on, gives its
        # index in every dimension.
        for stride in source.stride:
            start.append(offset // stride)
            offset %= stride
        # keyed by place: a bias is written twice, once while vLLM counts elements and once finally
        self._written[source.name, tuple(start), tuple(copied.shape)] = checksum(
            written.to(copied.dtype), shape=source.shape, start=start
        )
