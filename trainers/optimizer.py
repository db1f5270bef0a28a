"""Optimizer and learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from configs.trainer_schema import TrainerConfig


def make_lr_schedule(cfg: TrainerConfig, total_updates: int) -> Callable[[int], float]:
    """Return a function from the number of an update to its learning rate.

    Linear warm-up, then constant, or decay to `lr_min_fraction` * lr at update `total_updates`.
    """
    decay = cfg.count_decay_updates(total_updates)  # of wsd, which is constant before

    def get_lr(update: int) -> float:
        if update < cfg.warmup_updates:
            return cfg.lr * (update + 1) / cfg.warmup_updates
        start = total_updates - decay if cfg.lr_schedule == "wsd" else cfg.warmup_updates
        done = (update - start) / max(1, total_updates - start)
        match cfg.lr_schedule:
            case "constant":
                left = 1.0
            case "linear" | "wsd":
                left = 1 - max(0.0, done)
            case "cosine":
                left = (1 + math.cos(math.pi * done)) / 2
        return cfg.lr * (cfg.lr_min_fraction + (1 - cfg.lr_min_fraction) * left)

    return get_lr


def make_optimizer(cfg: TrainerConfig, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of float32 tensors; the learning rate is set before every update.

    Fused: an update reads and writes every tensor once.
    """
    if cfg.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
    return torch.optim.AdamW(
        parameters, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True
    )
