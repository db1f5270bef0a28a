"""Parameter groups of an optimizer: parameters with the same factor of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from configs.trainer_schema import TrainerConfig
from modeling.freeze import match_names
from trainers.muon import list_matrices


def group_parameters(model: nn.Module, cfg: TrainerConfig, tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return the optimizer's groups, in the order of their first tensors.

    tensors: what the optimizer updates, by the name of the parameter. A group has the keys params, lr_scale (factor of
    the learning rate) and is_matrix (Muon updates it).
    """
    scales: dict[str, float] = {}
    for pattern, scale in cfg.lr_scales.items():
        for name in match_names(model, pattern):
            scales[name] = scale
    matrices = list_matrices(model) if cfg.optimizer == "muon" else set[str]()
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((scales.get(name, 1.0), name in matrices), []).append(tensor)
    return [
        {"params": params, "lr_scale": scale, "is_matrix": is_matrix} for (scale, is_matrix), params in groups.items()
    ]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next update."""
    for group in optimizer.param_groups:
        # a checkpoint from before there were scales has none
        scaled = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):  # of an optimizer that is compiled
            # a tensor of its own: torch gives the one of the defaults to all groups
            group["lr"] = torch.full_like(group["lr"], scaled)
        else:
            group["lr"] = scaled
