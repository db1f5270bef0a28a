"""Checksums of the weights that vLLM's loaders write."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from core.types.weights import Bucket
from rollouts.engines.vllm_support.patches import TO_COPY, TorchDispatchMode
from trainers.weight_sync.fingerprint import checksum

# Checksums are sums modulo 2^64.
_WRAP = 1 << 64
_COPIES = (torch.ops.aten.clone.default, TO_COPY)


@dataclass(frozen=True)
class _Source:
    """Received tensor, or a copy of a part of it, located by byte range in a storage."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    dtype: torch.dtype
    """Dtype of the received tensor; a copy may have another."""
    whole: tuple[int, ...]
    """Shape of the received tensor."""
    dims: tuple[int, ...]
    """Dimension of the received tensor that each own dimension runs along."""
    start: tuple[int, ...]
    """Index of the first element in the received tensor."""
    view: tuple[int, ...] | None = None
    """Strides of the view of the received tensor whose copy this is, if the copy orders the rows within blocks
    otherwise."""


@dataclass(frozen=True)
class _Place:
    """Slice of a received tensor that a view of it, or of a copy of it, shows."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions of the view in the order of the received tensor's; the others have one element."""
    dims: tuple[int, ...]
    """Dimension of the received tensor that each of the view's dimensions in `order` runs along."""

    def take(self, values: Tensor) -> Tensor:
        """Return values of the view's shape as the slice, with the received tensor's dimensions."""
        others = [dim for dim in range(values.dim()) if dim not in self.order]
        return values.permute((*self.order, *others)).reshape(self.shape)


class LoadTrace(TorchDispatchMode):
    """Dispatch mode that intercepts every copy from a received tensor, and checksums the written parameter.

    A loader copies the slice of its rank. The source address gives the position of the slice. So each checksum counts
    at the right position, and the ranks' sums add up to the sender's. A loader may first transpose, clone or cast the
    slice; then the copy of the result is intercepted.
    """

    def __init__(self) -> None:
        super().__init__()
        # by storage; the weak reference frees the bytes, but prevents another storage from reusing the address
        self._sources: dict[int, tuple[StorageWeakRef, list[_Source]]] = {}
        self._written: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}

    def expect(self, bucket: Bucket) -> None:
        """Register tensors before loading. vLLM may keep them until a later bucket completes their layer."""
        for name, t in bucket:
            shape, every = tuple(t.shape), tuple(range(t.dim()))
            self._add_source(t, name=name, dtype=t.dtype, whole=shape, dims=every, start=(0,) * t.dim())

    def consumed(self) -> dict[str, int]:
        """Return the summed checksums of each tensor, by name, for tensors that were loaded."""
        sums: dict[str, int] = {}
        for (name, _, _), value in self._written.items():
            sums[name] = (sums.get(name, 0) + value) % _WRAP
        return sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:  # meta: vLLM only counts elements
            if (source := self._find_source(args[1])) is not None:
                self._record_checksum(source, *args[:2])
        elif func in _COPIES and not returned.is_meta and (source := self._find_source(args[0])) is not None:
            rest = {"dtype": source.dtype, "whole": source.whole}
            if (place := _find_place(source, args[0])) is not None:
                dims = [0] * args[0].dim()
                for own, dim in zip(place.order, place.dims, strict=True):
                    dims[own] = dim
                self._add_source(returned, name=source.name, dims=tuple(dims), start=place.start, **rest)
            # otherwise the copy is unknown, and what is loaded from it does not count
            elif _keeps_blocks(source, args[0]):
                rest |= {"dims": source.dims, "start": source.start}
                self._add_source(returned, name=source.name, view=args[0].stride(), **rest)
        return returned

    def _add_source(self, t: Tensor, *, name: str, **where: Any) -> None:
        begin = t.storage_offset() * t.itemsize
        source = _Source(name, begin, begin + t.nbytes, tuple(t.shape), t.stride(), t.itemsize, **where)
        reference = StorageWeakRef(t.untyped_storage())
        self._sources.setdefault(reference.cdata, (reference, []))[1].append(source)

    def _find_source(self, copied: Tensor) -> _Source | None:
        _, sources = self._sources.get(StorageWeakRef(copied.untyped_storage()).cdata, (None, []))
        at = copied.storage_offset() * copied.itemsize
        for source in sources:
            # an empty slice (the rank needs no part of the tensor) is at the tensor's end
            if source.begin <= at < source.end or (copied.numel() == 0 and at == source.end):
                return source
        return None

    def _record_checksum(self, source: _Source, written: Tensor, copied: Tensor) -> None:
        if copied.numel() == 0:
            self._written[source.name, (), (0,)] = 0
            return
        if written.numel() != copied.numel():  # repeated, as by a broadcast
            return
        if source.view is None and (place := _find_place(source, copied)) is not None:
            start, part = place.start, place.take(written.reshape(copied.shape))
        elif (found := _restore_rows(source, written, copied)) is not None:
            first, part = found
            start = (first, *(0 for _ in source.whole[1:]))
        else:
            return
        # keyed by place: a bias is written twice, once while vLLM counts elements and once finally
        value = checksum(part.to(source.dtype), shape=source.whole, start=start)
        self._written[source.name, start, tuple(part.shape)] = value


def _is_plain(source: _Source) -> bool:
    """Tell whether a source is a received tensor, or a copy of it, whole and row by row."""
    in_rows = all(
        size == 1 or step == prod(source.shape[dim + 1 :])
        for dim, (size, step) in enumerate(zip(source.shape, source.stride, strict=True))
    )
    is_whole = source.shape == source.whole and source.dims == tuple(range(len(source.whole)))
    return is_whole and in_rows and source.view is None


def _keeps_blocks(source: _Source, view: Tensor) -> bool:
    """Tell whether a view shows every element of a received tensor once, and by its first dimension blocks of rows."""
    shown = 1
    for step, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and step != shown:
            return False
        shown *= size
    block = shown // view.shape[0] if shown else 0
    at_start = view.storage_offset() * view.itemsize == source.begin
    whole_rows = view.stride(0) == block and block % prod(source.whole[1:]) == 0
    return _is_plain(source) and at_start and shown == prod(source.whole) and whole_rows


def _restore_rows(source: _Source, written: Tensor, copied: Tensor) -> tuple[int, Tensor] | None:
    """Return the first row and the rows that were written from a reshaped view or a reordered copy, as received.

    None unless they are whole rows of a reshaped view, or whole blocks of a reordered copy.
    """
    if source.view is None and not _is_plain(source):
        return None
    block = prod(source.whole[1:]) if source.view is None else source.view[0]
    first, rest = divmod(copied.storage_offset() - source.begin // source.itemsize, block)
    if rest or copied.numel() % block or not copied.is_contiguous():
        return None
    ordered = written.reshape(-1)
    if source.view is not None:
        shape = (copied.numel() // block, *source.shape[1:])
        ordered = written.new_empty(copied.numel())
        ordered.as_strided(shape, source.view).copy_(written.reshape(shape))
    return first * block // prod(source.whole[1:]), ordered.view(-1, *source.whole[1:])


def _find_place(source: _Source, view: Tensor) -> _Place | None:
    """Return the slice that a view of the source shows, from its strides; None for a reshaped view."""
    offset = view.storage_offset() - source.begin // source.itemsize
    # the offset of the slice's first element, divided by the strides from the largest on, gives its index
    own_start = [0] * len(source.shape)
    for dim in sorted(range(len(source.shape)), key=lambda dim: source.stride[dim], reverse=True):
        if source.shape[dim] > 1:
            own_start[dim] = offset // source.stride[dim]
            offset %= source.stride[dim]
    by_stride = {source.stride[dim]: dim for dim, size in enumerate(source.shape) if size > 1}
    start, shape, found = list(source.start), [1] * len(source.whole), dict[int, int]()
    for own, first in enumerate(own_start):
        start[source.dims[own]] += first
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size == 1:
            continue
        own = by_stride.get(stride)
        if own is None or own_start[own] + size > source.shape[own] or source.dims[own] in found:
            return None
        found[source.dims[own]], shape[source.dims[own]] = dim, size
    dims = sorted(found)
    return _Place(tuple(start), tuple(shape), tuple(found[dim] for dim in dims), tuple(dims))
