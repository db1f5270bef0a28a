"""Sender of a broadcast from GPU to GPU, over vLLM's own NCCL group. Never run yet."""

from __future__ import annotations

import torch

from core.types.weights import Bucket
from trainers.weight_sync.base import transfer_errors
from trainers.weight_sync.broadcast import WeightSender


class NcclSender(WeightSender):
    """Sender over vLLM's own NCCL group; headers go through the group's store. Never run yet.

    NCCL has no deadline: the engine's deadline, and that of the remote call, end a wait for a lost member.
    """

    transport = "nccl"

    def open(self, address: str = "127.0.0.1") -> int:
        from vllm.utils.network_utils import get_open_port

        self._where = {"master_address": address, "master_port": get_open_port()}
        return self._where["master_port"]

    def join(self, *, members: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        # else vLLM would put this thread on a new stream, which would not wait for the trainer's
        torch.cuda.set_stream(torch.cuda.current_stream())
        with transfer_errors(self.transport):
            self._nccl = trainer_init({**self._where, "world_size": members})
        self._nccl.group.store.set_timeout(self._timeout)

    def leave(self) -> None:
        del self._nccl

    def _send_bucket(self, bucket: Bucket) -> None:
        self._nccl.group.broadcast_obj([(name, t.dtype, t.shape) for name, t in bucket], src=0)
        stream = torch.cuda.current_stream()
        for _, tensor in bucket:
            self._nccl.broadcast(tensor.to(self._nccl.device).contiguous(), src=0, stream=stream)
        stream.synchronize()  # the bucket is freed after this

    def _send_end(self) -> None:
        self._nccl.group.broadcast_obj(None, src=0)
