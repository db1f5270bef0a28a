"""Distributed trainer with torch FSDP2: every tensor of a model is sharded over the ranks.

A rank stores a shard of the float32 weights, the gradients and the optimizer states. There is no second copy in
bfloat16: weights are rounded when the ranks gather them for a forward pass (trainers/fsdp2_units.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from algs.base import Algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.device import find_device
from core.types.weights import Bucket, ExportScope
from modeling.export import ExportedTensor, exported_tensors
from modeling.file_names import WeightExport, cut_buckets
from modeling.load import DTYPES
from trainers.checkpoint.fsdp2_state import WEIGHTS, from_saved, list_saved, read_state, to_saved, write_state
from trainers.distributed import DistributedTrainer
from trainers.fsdp2_units import settle_shards, shard_model
from trainers.learner import Learner
from trainers.models import ModelLoader
from trainers.optimizer import make_optimizer
from trainers.parameter_groups import group_parameters, set_lr
from trainers.references import clear_moments
from trainers.row_shards import as_part_of, cut_rows, local_part


class FsdpTrainer(DistributedTrainer):
    """Trainer rank with FSDP2."""

    def start_library(self, timeout: timedelta) -> None:
        self.mesh = init_device_mesh(torch.device(find_device()).type, (torch.distributed.get_world_size(),))

    def get_file_settings(self) -> dict[str, Any]:
        return {"backend": "ray", "trainer.strategy": "fsdp2"}  # any number of ranks reads them

    def make_loader(self, model: ModelConfig, alg: Algorithm) -> ModelLoader:
        place = partial(shard_model, mesh=self.mesh, dtype=DTYPES[self.dtype], offload=self.cfg.offload)
        return ModelLoader(model, self.cfg, alg, place=place, place_frozen=place)

    def make_learner(self, model: nn.Module) -> Learner:
        return FsdpLearner(model, self.cfg, self.mesh, dtype=DTYPES[self.dtype], sum_over_ranks=self.sum_over_ranks)

    def hold_frozen(self, model: nn.Module) -> nn.Module:
        sharded: Any = settle_shards(model, self.mesh, dtype=DTYPES[self.dtype], offload=self.cfg.offload)
        sharded.set_reshard_after_forward(True, recurse=False)  # no backward pass follows
        return sharded

    def gather_parameter(self, parameter: Tensor) -> Tensor:
        return gather(parameter, DTYPES[self.dtype])


class FsdpLearner:
    """Learner of one model, sharded by FSDP2. An adapter is not sharded: every rank holds it whole, and its
    gradients are summed."""

    def __init__(
        self,
        model: nn.Module,
        cfg: TrainerConfig,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ):
        self.model = self.module = settle_shards(model, mesh, dtype=dtype, offload=cfg.offload)
        self.sum_over_ranks, self.max_grad_norm = sum_over_ranks, cfg.max_grad_norm
        tensors = exported_tensors(model)
        # parameters are float32 in training, and buffers are as they were loaded
        self.exported = WeightExport(
            model, {scope: [narrow_parameters(t, dtype) for t in named] for scope, named in tensors.items()}
        )
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.held = {name: local_part(p.detach()) for name, p in self.trained.items()}
        """Local shard of each trained parameter, or the whole adapter parameter. Both are views, not copies."""
        groups = group_parameters(model, cfg, self.held)
        parts = MatrixParts({held: self.trained[name] for name, held in self.held.items()})
        self.optimizer = make_optimizer(cfg, groups, gather=parts.gather, cut=parts.cut)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # every unit's gradient is summed over the ranks, and added to that of this rank's rows

    def has_finite_gradients(self) -> bool:
        # a norm may overflow where no number does, and is NaN or infinite where one is; all are read in a few launches
        norm = nn.utils.get_total_norm([local_part(p.grad) for p in self.trained.values() if p.grad is not None])
        return self.sum_over_ranks((~torch.isfinite(norm)).double()).item() == 0

    def update(self, *, lr: float, apply: bool) -> float:
        self._sum_gradients_of_adapter()
        # the optimizer updates local shards, not DTensors, so the gradients move to the shards first
        for name, p in self.trained.items():
            self.held[name].grad = None if p.grad is None else local_part(p.grad)
            p.grad = None
        norm = self._compute_norm()
        value = float(norm) if apply else math.inf
        if math.isfinite(value):
            if self.max_grad_norm > 0:
                nn.utils.clip_grads_with_norm_(self.held.values(), self.max_grad_norm, norm)
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def _sum_gradients_of_adapter(self) -> None:
        """Sum adapter gradients over the ranks in a single all-reduce; adapters are not sharded."""
        adapter = [p for p in self.trained.values() if not isinstance(p, DTensor)]
        if not adapter:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in adapter]
        total = self.sum_over_ranks(torch.cat([grad.flatten() for grad in grads]))
        for p, grad in zip(adapter, total.split([p.numel() for p in adapter]), strict=True):
            p.grad = grad.view_as(p)

    def _compute_norm(self) -> Tensor:
        """Return the global gradient norm, float32 scalar, the same on every rank."""
        names = [name for name, held in self.held.items() if held.grad is not None]
        # squares of shards add up over the ranks; adapter gradients are equal on all ranks and count once
        of_rows = self._sum_squares([name for name in names if isinstance(self.trained[name], DTensor)])
        of_whole = self._sum_squares([name for name in names if not isinstance(self.trained[name], DTensor)])
        return (self.sum_over_ranks(of_rows) + of_whole).sqrt().float()

    def _sum_squares(self, names: list[str]) -> Tensor:
        grads = [grad for name in names if (grad := self.held[name].grad) is not None]
        device = next(iter(self.held.values())).device
        return nn.utils.get_total_norm(grads).to(device).double().square()

    def export_weights(self, max_bytes: int, scope: ExportScope = "whole") -> Generator[Bucket]:
        """Yield buckets; every rank must consume all of them."""

        def read(exported: ExportedTensor) -> Tensor:
            return exported.compute(lambda p: gather(p, exported.dtype))

        for groups in self.exported.split(scope, max_bytes):
            yield from cut_buckets(groups, max_bytes, read)

    def save_state(self, folder: Path) -> None:
        """Write the shards of this rank, without frozen parameters."""
        state: dict[str, Tensor] = {f"{WEIGHTS}.{name}": p.detach() for name, p in self.trained.items()}
        for name, p in self.trained.items():
            held = self.held[name]
            for kind, value in self.optimizer.state[held].items():
                if value is not None:
                    state[f"{kind}.{name}"] = to_saved(p, held, value)
        write_state(state, folder)

    def load_state(self, folder: Path) -> None:
        state: dict[str, Tensor] = {f"{WEIGHTS}.{name}": p.detach() for name, p in self.trained.items()}
        found: dict[str, Tensor] = {}
        for key, saved in list_saved(folder).items():
            kind, _, name = key.partition(".")
            if kind != WEIGHTS:
                p, held = self.trained[name], self.held[name]
                is_sharded = saved.ndim and saved.shape == p.shape
                found[key] = torch.zeros_like(saved, device=held.device)
                if is_sharded:
                    found[key] = torch.zeros_like(held, dtype=saved.dtype)
                state[key] = as_part_of(p, found[key]) if is_sharded else found[key]
        read_state(state, folder)
        for key, value in found.items():
            kind, _, name = key.partition(".")
            self.optimizer.state[self.held[name]][kind] = from_saved(value)
        self.show_masters()

    def list_masters(self) -> list[Tensor]:
        return [*self.held.values()]

    def show_masters(self) -> None:
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # what was gathered before has the old values

    def clear_moments(self) -> None:
        clear_moments(self.optimizer)

    def save_copies(self, copies: list[Tensor], folder: Path) -> None:
        write_state(self._name_copies(copies), folder)

    def load_copies(self, copies: list[Tensor], folder: Path) -> None:
        read_state(self._name_copies(copies), folder)

    def _name_copies(self, copies: list[Tensor]) -> dict[str, Tensor]:
        """Return copies of the shards as parts of whole tensors, which any number of ranks can read."""
        whole = zip(self.trained.items(), copies, strict=True)
        return {f"{WEIGHTS}.{name}": as_part_of(p, own) for (name, p), own in whole}


class MatrixParts:
    """Matrix parts of a rank: rows, or the whole matrices of some experts."""

    def __init__(self, sharded: dict[Tensor, nn.Parameter]):
        """sharded: parameter by this rank's part of it."""
        self.sharded = sharded

    def gather(self, held: Tensor, values: Tensor) -> Tensor:
        """Return the whole matrix, on the device, of which this rank has `values`. Collective."""
        p = self.sharded[held]
        return values if p.ndim > 2 else gather(as_part_of(p, values), values.dtype)

    def cut(self, held: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a matrix."""
        p = self.sharded[held]
        return whole if p.ndim > 2 else cut_rows(p, whole).to(held.device)


def narrow_parameters(exported: ExportedTensor, dtype: torch.dtype) -> ExportedTensor:
    """Return the export in `dtype`, if it is made of parameters."""
    return replace(exported, dtype=dtype) if isinstance(exported.parameters[0], nn.Parameter) else exported


def gather(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a full parameter on the device; shards are rounded to `dtype` before the all-gather."""
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value
    rows = local_part(value).to(device=value.device_mesh.device_type, dtype=dtype)  # from the CPU, where offloaded
    whole: Any = as_part_of(value, rows)
    return whole.full_tensor()
