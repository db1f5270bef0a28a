"""Free the memory of tensors for a while: their contents go to the host, and the tensors stay what they are.

A tensor is a view of a storage. A storage that is emptied keeps its identity, so every view, hook and list that knows
the tensor knows it still when the contents are back:

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

_ENDS = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
"""Kinds of objects that are not followed: code, from which everything in the process can be reached."""


def find_storages(*roots: object, device: str) -> list[UntypedStorage]:
    """Return, once each, the storages on `device` of all tensors that the roots hold, however deep.

    Storages that cannot be emptied, such as a file in memory, are left out.
    """
    found: dict[int, UntypedStorage] = {}
    for tensor in find_tensors(*roots):
        storage = tensor.untyped_storage()
        if storage.device == torch.device(device) and storage.nbytes() and storage.resizable():
            found[identify(storage)] = storage
    return list(found.values())


def identify(storage: UntypedStorage) -> int:
    """Return a number that all views of the same memory share, and no other storage has meanwhile."""
    return StorageWeakRef(storage).cdata


def find_tensors(*roots: object) -> Iterator[Tensor]:
    """Yield the tensors that the roots hold in attributes and containers, however deep; their gradients too."""
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
    """Storages whose contents are on the host, and whose own memory is free."""

    def __init__(self) -> None:
        self._emptied: list[tuple[UntypedStorage, int, UntypedStorage | None]] = []
        """Storages with their sizes and the copies of their contents."""

    def put(self, storages: Iterable[UntypedStorage], *, keep: bool = True) -> int:
        """Copy the storages to the host and free their memory; return the bytes that are free now.

        keep: False discards the contents, and `bring_back` restores nothing but the memory.
        """
        freed = 0
        for storage in storages:
            self._emptied.append((storage, storage.nbytes(), copy_to_host(storage) if keep else None))
            freed += storage.nbytes()
            storage.resize_(0)
        give_memory_back()
        return freed

    def bring_back(self) -> None:
        """Restore every storage, with the contents that were kept."""
        for storage, nbytes, copy in self._emptied:
            storage.resize_(nbytes)
            if copy is not None:
                storage.copy_(copy)
        self._emptied = []


def copy_to_host(storage: UntypedStorage) -> UntypedStorage:
    """Return a copy in the host's memory; of a GPU's in pinned memory, which is copied much faster."""
    on_gpu = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu).untyped_storage()
    copy.copy_(storage)
    return copy


def give_memory_back() -> None:
    """Let other processes have the GPU memory that torch keeps for later tensors."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # memory whose handles another process has had
        torch.cuda.empty_cache()
