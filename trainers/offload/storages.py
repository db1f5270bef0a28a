"""Offload tensor storages to the host, and restore them in place.

A tensor is a view of a storage. An emptied storage keeps the same identity, so every view, hook and list that refers to
the tensor stays valid when the contents are restored:

    aside = OffloadedStorages()
    aside.put(find_storages(learner, device="cuda:0"))     # the memory is free; to use a tensor now is a crash
    aside.bring_back()                                     # to the bit
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from core.device import normalize_device

_ENDS = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
"""Types of objects that are not followed: from code, everything in the process can be reached."""
_BLOCK_BYTES = 1 << 26


def find_storages(*roots: object, device: str) -> list[UntypedStorage]:
    """Return the distinct storages on `device` of all tensors reachable from the roots.

    Storages that cannot be resized, such as a memory-mapped file, are excluded.
    """
    found: dict[int, UntypedStorage] = {}
    wanted = normalize_device(device)
    for tensor in find_tensors(*roots):
        storage = tensor.untyped_storage()
        if storage.device == wanted and storage.nbytes() and storage.resizable():
            found[identify(storage)] = storage
    return list(found.values())


def identify(storage: UntypedStorage) -> int:
    """Return the id of a storage, shared by all views of the same memory."""
    return StorageWeakRef(storage).cdata


def find_tensors(*roots: object) -> Iterator[Tensor]:
    """Yield the tensors, and their gradients, reachable from the roots through attributes and containers."""
    seen: dict[int, object] = {}  # keeps them alive, or an id could come a second time
    waiting: list[Any] = [*roots]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _ENDS):
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            # a sharded tensor has no storage; it refers to its part on this rank, which has one
            if not callable(getattr(one, "to_local", None)):
                yield one
            if one.is_leaf:
                waiting.append(one.grad)
        waiting.extend(gc.get_referents(one))


class OffloadedStorages:
    """Storages with contents on the host and no device memory."""

    def __init__(self) -> None:
        self._emptied: list[tuple[UntypedStorage, int, list[Tensor]]] = []
        """Storages with sizes in bytes and the pieces of their host copies."""

    def put(self, storages: Iterable[UntypedStorage], *, keep: bool = True) -> int:
        """Copy the storages to the host and free the device memory; return the freed bytes.

        keep: False discards the contents; `bring_back` then restores only the memory.
        """
        chosen = list(storages)
        freed = sum(storage.nbytes() for storage in chosen)
        host = HostBlocks(freed, pinned=any(storage.device.type == "cuda" for storage in chosen))
        for storage in chosen:
            self._emptied.append((storage, storage.nbytes(), host.copy(view_bytes(storage)) if keep else []))
            storage.resize_(0)
        give_memory_back()
        return freed

    def bring_back(self) -> None:
        """Restore every storage, with the saved contents."""
        for storage, nbytes, pieces in self._emptied:
            storage.resize_(nbytes)
            if pieces:
                for part, piece in zip(view_bytes(storage).split([len(p) for p in pieces]), pieces, strict=True):
                    part.copy_(piece)
        self._emptied = []


class HostBlocks:
    """Host memory in blocks of one size, for copies of storages end to end.

    Copies of a GPU go to pinned memory, which is much faster. torch rounds it up to a power of two, so that a block for
    each storage could take twice the memory.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        """nbytes: size of all copies together."""
        self._missing, self._pinned = nbytes, pinned
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, source: Tensor) -> list[Tensor]:
        """Copy bytes, [n] uint8; return the pieces of the copy in order."""
        pieces: list[Tensor] = []
        while len(source):
            if not len(self._free):
                size = min(_BLOCK_BYTES, self._missing)
                self._missing -= size
                self._free = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            n = min(len(source), len(self._free))
            piece, self._free = self._free[:n], self._free[n:]
            pieces.append(piece.copy_(source[:n]))
            source = source[n:]
        return pieces


def view_bytes(storage: UntypedStorage) -> Tensor:
    """Return a storage as a tensor of bytes, [n] uint8, with the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def give_memory_back() -> None:
    """Release torch's cached GPU memory to other processes."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # memory whose handles another process has had
        torch.cuda.empty_cache()
