"""Optimizer and learning rate schedule."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from configs.trainer_schema import TrainerConfig
from core.errors import UserError
from trainers.muon import Muon


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


def make_optimizer(
    cfg: TrainerConfig, parameters: list[Tensor] | list[dict[str, Any]], **parts: Callable[[Tensor, Tensor], Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer of float32 tensors, or of groups of them; the learning rate is set before every update.

    parts: `gather` and `cut` of Muon. Raises UserError for a path that names no optimizer, and for settings that it
    does not take.
    """
    # fused: an update reads and writes every tensor once
    kind: dict[str, Any] = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "fused": True}
    adamw = kind | {"betas": cfg.betas, "eps": cfg.eps}
    if cfg.optimizer == "sgd":
        return torch.optim.SGD(parameters, **kind)
    if cfg.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **adamw)
    try:
        if cfg.optimizer == "muon":
            return Muon(parameters, **adamw, **parts, **cfg.optimizer_settings)
        return _find_class(cfg.optimizer)(parameters, lr=cfg.lr, **cfg.optimizer_settings)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"trainer.optimizer={cfg.optimizer} refuses this model or trainer.optimizer_settings: {error}"
        ) from error


def _find_class(path: str) -> type[torch.optim.Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"trainer.optimizer={path} cannot be imported ({error}): install its package, or choose one of torch.optim"
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(
            f"trainer.optimizer={path} is no torch.optim.Optimizer: name a class, such as torch.optim.NAdam"
        )
    return found
