"""Engine of the policy's frozen opponent in games (`rollout.opponent`)."""

from __future__ import annotations

from dataclasses import replace

from rollouts.engines.base import EngineConfig


def configure_opponent(path: str, policy: EngineConfig) -> EngineConfig:
    """Return the settings of an engine hf with the weights of a folder, which samples as the policy's engine does."""
    return replace(
        policy,
        model_path=path,
        starts_empty=False,
        lora=None,
        quantization=None,
        options={},
        routes=False,
        tensor_parallel_size=1,
        over_nccl=False,
        over_ipc=False,
    )
