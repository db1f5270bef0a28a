"""Quantised linear layers of vLLM: the recipes that may use them, and vLLM's arguments.

fp8 is vLLM's own method. vLLM's int8 for weights in full precision rounds experts only, so int8 is a method of ours on
vLLM's kernels (int8.py). Both round again after each weight update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from configs.rollout_schema import RolloutConfig
from core.errors import UserError
from modeling.experts import list_blocks
from rollouts.engines.base import EngineConfig

INT8 = "feynrl_int8"
"""Name of our method in vLLM's registry."""
FP8 = "fp8_per_channel"
"""vLLM's method with a scale per output channel, and per token for inputs."""


def check_quantization(rollout: RolloutConfig, *, dtype: str, on_gpu: bool) -> None:
    """Raise UserError for a format that this build of vLLM does not have, or not with a model of this dtype."""
    if rollout.quantization == "fp8" and not on_gpu:
        has_int8 = has_int8_products() and not (dtype == "float32" and has_tiles())
        advice = "set it to int8, or" if has_int8 else "leave it out, or set"
        raise UserError(
            f"rollout.quantization is fp8, which vLLM does not have on a CPU: {advice} rollout.engine to hf"
        )
    if rollout.quantization == "int8" and not on_gpu and not has_int8_products():
        raise UserError(
            "rollout.quantization is int8, and on a CPU without VNNI vLLM's products of eight bits overflow, so that "
            "samples are wrong: leave it out, set rollout.engine to hf, or use another CPU"
        )
    if dtype == "float32" and (on_gpu or has_tiles()):
        where = "a GPU" if on_gpu else "a CPU with AMX"
        raise UserError(
            f"rollout.quantization is {rollout.quantization} and model.dtype is float32, and vLLM's kernels for eight "
            f"bits return no float32 on {where}: set model.dtype to bfloat16, or rollout.engine to hf"
        )


def has_tiles() -> bool:
    """Tell whether this CPU has AMX, for which vLLM has another kernel."""
    return bool(torch.cpu.get_capabilities().get("amx_tile"))


def has_int8_products() -> bool:
    """Tell whether this CPU adds products of eight bits in 32 bits (VNNI, AMX). Others add pairs in 16, and saturate.

    See https://uxlfoundation.github.io/oneDNN/dev_guide_int8_computations.html.
    """
    found = torch.cpu.get_capabilities()
    if found.get("architecture") != "x86_64":
        return True
    return any(found.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))


def check_rounded(rollout: RolloutConfig, model: nn.Module) -> None:
    """Raise UserError for a mixture in int8. model: may be on the meta device."""
    if rollout.quantization == "int8" and list_blocks(model):
        raise UserError(
            "rollout.quantization=int8 rounds no experts of a mixture: leave it out, or on a GPU set it to fp8"
        )


def quantization_args(config: EngineConfig) -> dict[str, Any]:
    """Return vLLM's EngineArgs that quantise."""
    if config.quantization is None:
        return {}
    return {"quantization": FP8 if config.quantization == "fp8" else INT8}
