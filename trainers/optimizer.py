"""Optimizer and learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from configs.trainer_schema import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate schedule: linear warm-up, then constant, or decay to `floor` * lr at update `total`."""

    lr: float
    warmup: int
    total: int
    shape: Literal["constant", "linear", "cosine", "wsd"]
    floor: float = 0.0
    """Fraction of lr at the end of the decay."""
    decay: int = 0
    """Number of decay updates of `wsd`, which is constant before."""

    def get_lr(self, update: int) -> float:
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        start = self.total - self.decay if self.shape == "wsd" else self.warmup
        done = (update - start) / max(1, self.total - start)
        match self.shape:
            case "constant":
                left = 1.0
            case "linear" | "wsd":
                left = 1 - max(0.0, done)
            case "cosine":
                left = (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.floor + (1 - self.floor) * left)


def make_lr_schedule(cfg: TrainerConfig, total_updates: int) -> LearningRateSchedule:
    return LearningRateSchedule(
        lr=cfg.lr,
        warmup=cfg.warmup_updates,
        total=total_updates,
        shape=cfg.lr_schedule,
        floor=cfg.lr_min_fraction,
        decay=cfg.count_decay_updates(total_updates),
    )


def make_optimizer(cfg: TrainerConfig, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of float32 tensors; the learning rate is set before every update.

    Fused: an update reads and writes every tensor once.
    """
    if cfg.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
    return torch.optim.AdamW(
        parameters, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True
    )
