"""Memory of an engine of the policy, with the model of an opponent in its process."""

from __future__ import annotations

import math

from configs.eval_schema import EvalConfig
from configs.schema import RLConfig
from core.errors import UserError
from driver.checks.memory_estimate import CUDA_GIB, GIB, MemoryEstimate, estimate_engine_gib, find_gpu_gib
from driver.start.devices import uses_gpus
from modeling.hf_config import ModelUnreadable, meta_model
from modeling.merge import is_adapter


def describe_engine_memory(cfg: RLConfig, memory: MemoryEstimate) -> str:
    """Describe the memory of an engine's rank for --explain."""
    text = f"about {memory.per_engine:.2f} GiB of weights per rank, and its cache"
    if (gpu_gib := find_vllm_gpu_gib(cfg)) is not None:
        rollout = cfg.rollout
        share = rollout.gpu_memory_utilization
        whole = estimate_engine_gib(gpu_gib, utilization=share, enforce_eager=rollout.enforce_eager)
        of_gpu = f"{whole:.1f} GiB of a GPU's {gpu_gib:.1f}"
        text += f": {of_gpu} (rollout.gpu_memory_utilization={share:g}, and graphs)"
    if not cfg.rollout.is_opponent_loaded:
        return text
    try:
        return f"{text}; beside it {estimate_opponent_gib(cfg):.2f} GiB of weights of rollout.opponent"
    except ModelUnreadable as error:  # an opponent that is made later
        return f"{text}; beside it rollout.opponent, unknown: {error}"


def check_engine_memory(cfg: RLConfig | EvalConfig) -> None:
    """Raise UserError, with numbers, if an opponent does not fit on the GPU of an engine of vLLM."""
    gpu_gib = find_vllm_gpu_gib(cfg) if cfg.rollout.is_opponent_loaded else None
    if gpu_gib is None:
        return
    share, eager = cfg.rollout.gpu_memory_utilization, cfg.rollout.enforce_eager
    # The opponent is loaded after vLLM has taken its share, in another process with a CUDA context of its own.
    free = gpu_gib - estimate_engine_gib(gpu_gib, utilization=share, enforce_eager=eager)
    if (needed := estimate_opponent_gib(cfg) + CUDA_GIB) > free:
        raise UserError(
            f"rollout.opponent={cfg.rollout.opponent} takes {needed:.2f} GiB of an engine's GPU, and vLLM leaves "
            f"{max(free, 0):.2f} of {gpu_gib:.2f} GiB to it: lower rollout.gpu_memory_utilization={share:g}, or take a "
            "smaller model"
        )


def estimate_opponent_gib(cfg: RLConfig | EvalConfig) -> float:
    """Return the weights of the opponent in GiB, all copies. Raises UserError for an unreadable model."""
    folder, trusts = cfg.rollout.opponent_folder, cfg.model.trust_remote_code
    # of a snapshot of the policy as of an adapter
    path = cfg.model.path if folder is None or is_adapter(folder) else folder
    model = meta_model(path, key="rollout.opponent", trust_remote_code=trusts)
    held = 2 if cfg.model.dtype == "bfloat16" else 4
    return count_opponents(cfg) * sum(p.numel() for p in model.parameters()) * held / GIB


def count_opponents(cfg: RLConfig | EvalConfig) -> int:
    """Return the number of opponents that an engine's process holds at a time."""
    every = cfg.rollout.opponent_every
    if every is None or isinstance(cfg, EvalConfig):
        return 1
    # A snapshot is loaded beside the last one. Games that began max_staleness steps ago keep those before that.
    return 1 + max(1, math.ceil(cfg.max_staleness / every))


def find_vllm_gpu_gib(cfg: RLConfig | EvalConfig) -> float | None:
    """Return the memory of the smallest GPU in GiB; None without one, or for an engine other than vLLM."""
    return find_gpu_gib() if uses_gpus(cfg) and cfg.rollout.engine.startswith("vllm") else None
