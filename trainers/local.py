"""Local trainer: plain torch, a single process, no distributed code. The distributed trainers are tested against it."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from algs.base import Algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.device import find_device
from core.types.weights import Bucket, ExportScope
from modeling.export import gather_tensors
from modeling.file_names import WeightExport, cut_buckets
from modeling.saved_model import save_exported
from trainers.checkpoint.copies import load_tensors, save_tensors
from trainers.checkpoint.state import reading
from trainers.learner import Learner, TrainerSettings
from trainers.optimizer import make_optimizer
from trainers.parameter_groups import group_parameters, set_lr
from trainers.references import clear_moments
from trainers.trainer import Trainer


class LocalTrainer(Trainer):
    """Trainer in one process, without DeepSpeed."""

    def __init__(self, model: ModelConfig, cfg: TrainerConfig, alg: Algorithm, **settings: Unpack[TrainerSettings]):
        super().__init__(model, cfg, alg, device=find_device(), **settings)

    def make_learner(self, model: nn.Module) -> Learner:
        return TorchLearner(model.to(self.device), self.cfg)

    def sum_over_rows(self, values: Tensor) -> Tensor:
        return values

    def write_model(self, learner: Learner, folder: Path, scopes: list[ExportScope]) -> list[str]:
        return save_exported(learner.model, folder, gather_tensors(learner.export_weights, scopes))


class TorchLearner:
    """Learner in plain torch. A bfloat16 model has float32 master weights, as with DeepSpeed."""

    def __init__(self, model: nn.Module, cfg: TrainerConfig):
        self.model = self.module = model
        self.exported = WeightExport(model)
        self.max_grad_norm = cfg.max_grad_norm
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = [*trained.values()]
        self.master = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        named = dict(zip(trained, self.master, strict=True))
        self.optimizer = make_optimizer(cfg, group_parameters(model, cfg, named))

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for p, m in zip(self.parameters, self.master, strict=True):
            if p is not m and p.grad is not None:  # accumulate in float32, as DeepSpeed does
                m.grad = p.grad.float() if m.grad is None else m.grad + p.grad
                p.grad = None

    def has_finite_gradients(self) -> bool:
        # the norm of `update`, which may overflow where no number does; a single result is waited for
        return math.isfinite(self._measure_norm())

    def update(self, *, lr: float, apply: bool) -> float:
        norm = self._measure_norm()
        value = float(norm) if apply else math.inf  # the only wait for a GPU
        if math.isfinite(value):
            if self.max_grad_norm > 0:
                nn.utils.clip_grads_with_norm_(self.master, self.max_grad_norm, norm)
            set_lr(self.optimizer, lr)
            self.optimizer.step()
            self.show_masters()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def _measure_norm(self) -> Tensor:
        return nn.utils.get_total_norm([m.grad for m in self.master if m.grad is not None])

    def export_weights(self, max_bytes: int, scope: ExportScope = "whole") -> Generator[Bucket]:
        for groups in self.exported.split(scope, max_bytes):
            yield from cut_buckets(groups, max_bytes)

    def save_state(self, folder: Path) -> None:
        folder.mkdir()
        torch.save({"weights": self.master, "optimizer": self.optimizer.state_dict()}, folder / "state.pt")

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        with reading(folder / "state.pt"):
            saved = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        for m, weights in zip(self.master, saved["weights"], strict=True):
            m.copy_(weights)
        self.show_masters()  # as after every update
        self.optimizer.load_state_dict(saved["optimizer"])

    def list_masters(self) -> list[Tensor]:
        return self.master

    @torch.no_grad()
    def show_masters(self) -> None:
        for p, m in zip(self.parameters, self.master, strict=True):
            if p is not m:
                p.copy_(m)

    def clear_moments(self) -> None:
        clear_moments(self.optimizer)

    def save_copies(self, copies: list[Tensor], folder: Path) -> None:
        save_tensors(copies, folder, rank=0)

    def load_copies(self, copies: list[Tensor], folder: Path) -> None:
        load_tensors(copies, folder, rank=0)
