"""Base of the distributed trainers, DeepSpeed and FSDP2. One process per rank."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import TCPStore

from algs.base import Algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.cluster.addresses import host_store
from core.device import find_device
from core.errors import UserError
from core.patches import set_group_timeouts
from core.types.weights import ExportScope
from modeling.attention import refuse_sequence_parallel
from modeling.export import gather_tensors
from modeling.layout_probe import can_share_prefixes, find_probe, layout_for
from modeling.saved_model import save_exported
from modeling.sequence_parallel import SequenceGroup
from trainers.learner import Learner, TrainerSettings
from trainers.trainer import Trainer
from trainers.weight_sync.source import WeightSource


class DistributedTrainer(Trainer):
    """Trainer rank; torch.distributed reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE."""

    def __init__(
        self,
        model: ModelConfig,
        cfg: TrainerConfig,
        alg: Algorithm,
        *,
        timeout_s: float,
        **settings: Unpack[TrainerSettings],
    ):
        """timeout_s: deadline of every collective."""
        self.dtype = model.dtype
        timeout = timedelta(seconds=timeout_s)
        form_group("nccl" if torch.cuda.is_available() else "gloo", timeout)
        self.start_library(timeout)
        device = find_device()  # a library may have chosen it
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if cfg.sequence_parallel > 1:
            self.sequence_group = form_sequence_group(cfg.sequence_parallel)
        super().__init__(model, cfg, alg, device=device, **settings)
        if self.sequence_group is not None:
            self.check_models(self.sequence_group.size)
        set_group_timeouts(timeout)  # a library makes groups of its own, with torch's default
        self.weight_source = WeightSource(self, self.timer, is_sender=self.rank == 0)

    def get_file_settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def start_library(self, timeout: timedelta) -> None:
        """Prepare the library, after the group of all ranks was formed and before a model is loaded."""
        raise NotImplementedError

    def check_models(self, size: int) -> None:
        """Raise UserError for a loaded model that does not support sequence parallelism over `size` ranks."""
        for model in self.list_models():
            config: Any = model.config
            why = refuse_sequence_parallel(config, size)
            if why is None and not (layout_for(self.cfg.layout, model) == "packed" and can_share_prefixes(model)):
                why = f"this {config.model_type} model computes no packed rows with shared prefixes"
            if why is None and find_probe(model).by_path:
                why = f"a rank has a part of every row, and {find_probe(model).by_path} read whole sequences"
            if why is not None:
                raise UserError(f"trainer.sequence_parallel={size}: {why}")

    def sum_over_rows(self, values: Tensor) -> Tensor:
        together = self.sequence_group
        # every rank of a sequence group has the same rows, so only the first may contribute to the sum
        counts = together is None or together.place == 0
        return self.sum_over_ranks(values if counts else torch.zeros_like(values))

    def find_largest(self, value: Tensor) -> Tensor:
        largest = value.clone()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return largest

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all ranks, on every rank."""
        total = values.to(self.device)
        torch.distributed.all_reduce(total)
        return total.to(values.device)

    def write_model(self, learner: Learner, folder: Path, scopes: list[ExportScope]) -> list[str]:
        """Write from rank 0; the other ranks take part in gathering."""
        # the ranks of a machine share its memory, which may not hold a copy of the model for each of them
        exported = gather_tensors(learner.export_weights, scopes, keeps=self.rank == 0)
        try:
            return save_exported(learner.model, folder, exported) if self.rank == 0 else []
        finally:
            # a full disk is no reason for the others to wait until their deadline
            torch.distributed.barrier()


def form_sequence_group(size: int) -> SequenceGroup:
    """Return this rank's sequence group: `size` consecutive ranks, on the same machine if possible."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
    own, _ = torch.distributed.new_subgroups_by_enumeration(groups)
    return SequenceGroup(place=rank % size, size=size, group=own)


def form_group(backend: str, timeout: timedelta) -> None:
    """Initialize the default process group, before a library does.

    The store of a library would listen on all network addresses; this store listens on MASTER_ADDR only.
    """
    if torch.distributed.is_initialized():  # a second trainer in this process
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        store = host_store(address, port, timeout=timeout, size=size)
    else:
        store = TCPStore(address, port, size, is_master=False, timeout=timeout)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
