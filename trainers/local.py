"""The reference trainer: plain torch, one process, no distributed code. The DeepSpeed trainer is tested against it."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from algs.base import Algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.buckets import in_buckets
from modeling.export import pieces_of, save_parts
from trainers.learner import Learner, Settings
from trainers.optimizer import make_optimizer
from trainers.trainer import Trainer
from weight_sync.base import Part


class ReferenceTrainer(Trainer):
    def __init__(self, model: ModelConfig, cfg: TrainerConfig, alg: Algorithm, **settings: Unpack[Settings]):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(model, cfg, alg, device=device, **settings)

    def learner(self, model: nn.Module) -> Learner:
        return TorchLearner(model.to(self.device), self.cfg)

    def add_up(self, values: Tensor) -> Tensor:
        return values

    def save(self, folder: Path) -> None:
        with self.ledger.doing("save"):
            save_parts(self.model, folder, self.gathered())


class TorchLearner:
    """Keeps float32 master weights beside a bfloat16 model, as DeepSpeed does; in float32 they are one."""

    def __init__(self, model: nn.Module, cfg: TrainerConfig):
        self.model = self.module = model
        self.pieces = pieces_of(model)
        self.max_grad_norm = cfg.max_grad_norm
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.master = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        self.optimizer = make_optimizer(cfg, self.master)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for p, m in zip(self.parameters, self.master, strict=True):
            if p is not m and p.grad is not None:  # accumulate in float32, as DeepSpeed does
                m.grad = p.grad.float() if m.grad is None else m.grad + p.grad
                p.grad = None

    def gradients_are_finite(self) -> bool:
        return all(bool(torch.isfinite(m.grad).all()) for m in self.master if m.grad is not None)

    def update(self, *, lr: float, apply: bool) -> float:
        norm = nn.utils.get_total_norm([m.grad for m in self.master if m.grad is not None])
        if not apply:
            norm = torch.full_like(norm, torch.inf)
        if torch.isfinite(norm):
            if self.max_grad_norm > 0:
                nn.utils.clip_grads_with_norm_(self.master, self.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            with torch.no_grad():
                for p, m in zip(self.parameters, self.master, strict=True):
                    if p is not m:
                        p.copy_(m)
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def weights(self, max_bytes: int, part: Part = "whole") -> Generator[list[tuple[str, Tensor]]]:
        for bucket in in_buckets(self.pieces[part], lambda piece: piece.nbytes, max_bytes):
            yield [(piece.name, piece.make()) for piece in bucket]

    def save_state(self, folder: Path) -> None:
        folder.mkdir()
        torch.save({"weights": self.master, "optimizer": self.optimizer.state_dict()}, folder / "state.pt")

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        saved = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        for p, m, weights in zip(self.parameters, self.master, saved["weights"], strict=True):
            m.copy_(weights)
            if p is not m:
                p.copy_(m)  # as after every update
        self.optimizer.load_state_dict(saved["optimizer"])
