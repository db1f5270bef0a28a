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
            if callable(to_local := getattr(one, "to_local", None)):
                # a sharded tensor has no storage; its part on this rank has one, and would be a view with gradients on
                with torch.no_grad():
                    waiting.append(to_local())
            else:
                yield one
            if one.is_leaf:
                waiting.append(one.grad)
        waiting.extend(gc.get_referents(one))


class OffloadedStorages:
    """Storages with contents on the host and no device memory."""

    def __init__(self) -> None:
        self._emptied: list[tuple[UntypedStorage, int, UntypedStorage | None]] = []
        """Storages with sizes in bytes and host copies."""

    def put(self, storages: Iterable[UntypedStorage], *, keep: bool = True) -> int:
        """Copy the storages to the host and free the device memory; return the freed bytes.

        keep: False discards the contents; `bring_back` then restores only the memory.
        """
        freed = 0
        for storage in storages:
            self._emptied.append((storage, storage.nbytes(), copy_to_host(storage) if keep else None))
            freed += storage.nbytes()
            storage.resize_(0)
        give_memory_back()
        return freed

    def bring_back(self) -> None:
        """Restore every storage, with the saved contents."""
        for storage, nbytes, copy in self._emptied:
            storage.resize_(nbytes)
            if copy is not None:
                storage.copy_(copy)
        self._emptied = []


def copy_to_host(storage: UntypedStorage) -> UntypedStorage:
    """Return a copy in host memory. GPU storages are copied to pinned memory, which is much faster."""
    on_gpu = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu).untyped_storage()
    copy.copy_(storage)
    return copy


def give_memory_back() -> None:
    """Release torch's cached GPU memory to other processes."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # memory whose handles another process has had
        torch.cuda.empty_cache()
