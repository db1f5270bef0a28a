"""Quantised linear layers of vLLM: the recipes that may use them, and vLLM's arguments.

fp8 is vLLM's own method. vLLM's int8 for weights in full precision rounds experts only, so int8 is a method of ours on
vLLM's kernels (int8.py). Both round again after each weight update.
"""

from __future__ import annotations

from typing import Any

from configs.rollout_schema import RolloutConfig
from core.errors import UserError
from modeling.experts import list_blocks
from modeling.hf_config import meta_model
from rollouts.engines.base import EngineConfig

INT8 = "feynrl_int8"
"""Name of our method in vLLM's registry."""
FP8 = "fp8_per_channel"
"""vLLM's method with a scale per output channel, and per token for inputs."""


def check_quantization(rollout: RolloutConfig, *, on_gpu: bool) -> None:
    """Raise UserError for a format that this build of vLLM does not have."""
    if rollout.quantization == "fp8" and not on_gpu:
        raise UserError(
            "rollout.quantization is fp8, which vLLM does not have on a CPU: set it to int8, or rollout.engine to hf"
        )


def quantization_args(config: EngineConfig) -> dict[str, Any]:
    """Return vLLM's EngineArgs that quantise. Raises UserError for int8 with a mixture of experts."""
    if config.quantization is None:
        return {}
    if config.quantization == "fp8":
        return {"quantization": FP8}
    if list_blocks(meta_model(config.model_path, trust_remote_code=config.trust_remote_code)):
        raise UserError("rollout.quantization=int8 rounds no experts of a mixture: set it to fp8, or leave it out")
    return {"quantization": INT8}
