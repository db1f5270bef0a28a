"""Weights between two processes on the same GPU: the sender passes handles of its memory, and nothing is copied twice.

Two NCCL ranks on one GPU are refused, so trainers and engines that share their GPUs go this way. A chunk
(trainers/weight_sync/chunks.py) holds handles instead of tensors, in the form of vLLM's own IPC engine. Every trainer
rank writes its own, and each rank of an engine opens the one of its GPU. It ran on one GPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.errors import TransportFailed
from core.gpu_contract import load_part
from core.types.weights import Bucket
from trainers.weight_sync.base import transfer_errors
from trainers.weight_sync.chunks import ChunkWriter

_PLACE_OF_DEVICE = 6
"""Place of the device's index among the arguments of a handle: another process may count its GPUs otherwise."""


class HandleWriter(ChunkWriter):
    """Writer of chunks of memory handles. The memory stays unchanged until the next chunk."""

    def _store(self, bucket: Bucket) -> None:
        self._shared: list[Tensor] = [tensor.detach().contiguous() for _, tensor in bucket]
        torch.cuda.synchronize()  # the reader's process knows nothing of what still runs here
        reduce_tensor = load_part("reduce_tensor")
        handles = [(name, reduce_tensor(t)[1]) for (name, _), t in zip(bucket, self._shared, strict=True)]
        self.chunk = pickle.dumps((name_gpu(torch.cuda.current_device()), handles))


def join_chunks(of_ranks: Sequence[bytes]) -> bytes:
    """Join the chunks of the trainer ranks on an engine's GPUs into a single chunk."""
    return pickle.dumps([*of_ranks])


def open_handles(chunk: bytes, device: int) -> Bucket:
    """Return copies of the tensors whose handles are of this GPU. Raises TransportFailed where none is.

    Copies, because vLLM keeps tensors until their layer is complete, and the sender uses the memory again before that.
    """
    own = name_gpu(device)
    with transfer_errors("ipc"):
        for gpu, handles in map(pickle.loads, pickle.loads(chunk)):
            if gpu == own:
                return [(name, _open_handle(handle, device).clone()) for name, handle in handles]
    raise TransportFailed(f"weights did not get through over ipc: no trainer rank is on the GPU {own} of this engine")


def name_gpu(device: int) -> str:
    """Return the name of a GPU, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _open_handle(handle: tuple[Any, ...], device: int) -> Tensor:
    before, after = handle[:_PLACE_OF_DEVICE], handle[_PLACE_OF_DEVICE + 1 :]
    return load_part("rebuild_cuda_tensor")(*before, device, *after)
