"""The machine of a comparison of tools/benchmarks/learn_vs_trl.py: its device, and the settings that belong to it.

They are in no digest of settings: results of a CPU and of a GPU are of the same work. A result names its device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.gpus import find_gpus
from core.timing.deadlines import GPU_CHECK_TIMEOUT_S

CPU = "cpu"
ON_ONE_GPU: dict[str, Any] = {
    "placement": "colocate",
    "rollout": {
        # an explicit cache spares vLLM the profile of the memory, which fails beside other processes on the GPU
        "kv_cache_gib": 2,
        "gpu_memory_utilization": 0.1,
        # no graphs: compiling and capturing them takes longer than 30 steps of a small model
        "enforce_eager": True,
        # its first pass, of the largest batch, would take more memory than a step does
        "vllm": {"max_num_seqs": 128, "max_num_batched_tokens": 4096},
    },
    # DeepSpeed's own buckets take 2 GiB
    "trainer": {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 50_000_000}}},
}
"""Keys of a recipe on Ray and vLLM, so that several runs share one GPU."""
TRL_ON_GPU: dict[str, Any] = {"use_cpu": False, "tf32": False}
"""Settings of TRL on a GPU. Both sides multiply in float32: TF32 is off by torch's default on ours, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Device of both sides, and settings of each side on it."""

    device: str = CPU
    """Name of the GPU, or cpu."""
    ours: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of our recipe on Ray."""
    trl: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of TRL's configuration."""

    def add_keys(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe with the keys of this machine. A recipe in one process has none."""
        added = {} if recipe.get("backend") == "local" else self.ours
        sections = {name: {**recipe.get(name, {}), **keys} for name, keys in added.items() if isinstance(keys, dict)}
        return {**recipe, **added, **sections}

    def count_threads(self, backend: str) -> int:
        """Return the threads of TRL's tensor library, as on our side."""
        import torch

        # torch's choice in one process, and the machine's cores in an actor that has a CPU or the only GPU
        return torch.get_num_threads() if backend == "local" else os.cpu_count() or 1


def find_machine() -> Machine:
    """Return the settings of this machine. Raises SystemExit if it has several GPUs, over which TRL would spread."""
    gpus = find_gpus(timeout_s=GPU_CHECK_TIMEOUT_S)
    if gpus.failure or gpus.count > 1:
        found = gpus.failure or f"this machine has {gpus.count} GPUs, and a comparison takes one"
        raise SystemExit(f"error: {found}: let CUDA_VISIBLE_DEVICES name one GPU, or none for the CPU")
    return Machine(device=gpus.devices[0].name, ours=ON_ONE_GPU, trl=TRL_ON_GPU) if gpus.count else Machine()
