"""Float32 weights of DeepSpeed's optimizers, which each ZeRO stage keeps in a place of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from configs.trainer_schema import TrainerConfig
from core.errors import UserError
from core.patches import show_partitioned_weights

PLACES = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Attributes of the optimizers of ZeRO-3, of ZeRO-1 and 2, and of bfloat16 without ZeRO."""


def find_offload(cfg: TrainerConfig) -> str | None:
    """Return the key with which DeepSpeed keeps weights or states elsewhere; None without one."""
    zero = cfg.deepspeed.get("zero_optimization", {})
    found = (key for key in ("offload_param", "offload_optimizer") if key in zero)
    return next((f"trainer.deepspeed.zero_optimization.{key}" for key in found), None)


def refuse_offload(cfg: TrainerConfig, who: str) -> None:
    """Raise UserError if DeepSpeed keeps weights elsewhere, where they cannot be exchanged. who: asks for a copy."""
    if away := find_offload(cfg):
        raise UserError(
            f"{away} is set, and {who}: for a copy that follows the policy, "
            "its weights must be on the device: leave it out, or set trainer.strategy=fsdp2"
        )


def list_masters(optimizer: Any) -> list[Tensor]:
    """Return the float32 weights that this rank updates, flat where ZeRO shards them."""
    for place in PLACES:
        if (found := getattr(optimizer, place, None)) is not None:
            return [*found]
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def show_masters(optimizer: Any) -> None:
    """Give the model the values of the float32 weights. Collective."""
    if hasattr(optimizer, PLACES[0]):
        show_partitioned_weights(optimizer)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
