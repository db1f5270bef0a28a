"""How much memory a run holds, from the shapes of its models, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algs import load_algorithm
from configs.schema import RLConfig, RunConfig, SLConfig
from configs.trainer_schema import LoraConfig
from driver.devices import count_gpus
from driver.explain_vision import measure_vision
from driver.load_recipe import Loaded
from modeling.hf_config import check_model_folder, meta_model

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory that a run holds, in GiB, without activations, caches and what a process itself takes."""

    parameters: int
    """Parameters of the model, without an adapter."""
    adapter: int
    weights: float
    """Weights of one trainer rank, as are the next three."""
    gradients: float
    optimizer: float
    frozen: float
    per_engine: float
    """Weights of one rank of an engine; 0 without engines."""
    checkpoint: float
    """Size of one checkpoint, of all ranks."""
    saved: float
    """Size of the saved model."""

    @property
    def per_rank(self) -> float:
        """GiB of one trainer rank."""
        return self.weights + self.gradients + self.optimizer + self.frozen


def estimate_memory(loaded: Loaded[Any]) -> MemoryEstimate:
    """Return what weights, gradients and optimizer states take. Raises UserError where a config cannot be read."""
    cfg: RunConfig = loaded.cfg
    trusts = cfg.model.trust_remote_code
    n = count_parameters(cfg.model.path, trust_remote_code=trusts)
    held = 2 if cfg.model.dtype == "bfloat16" else 4
    master = 4 if held == 2 else 0
    states = 8 if cfg.trainer.optimizer == "adamw" else 0
    ranks, stage = cfg.trainer.ranks, cfg.trainer.zero_stage if cfg.backend == "ray" else 0
    weights = held / (ranks if stage == 3 else 1)
    gradients = 4 / (ranks if stage >= 2 else 1)
    optimizer = (master + states) / (ranks if stage >= 1 else 1)
    alg = load_algorithm(loaded.alg_spec, cfg.alg)
    lora = cfg.model.lora
    adapter = 0 if lora is None else count_adapter(cfg.model.path, lora, trust_remote_code=trusts)
    critic = 0 if alg.value_lr is None else n  # the value model is as large as the policy, and has no adapter
    tower = count_frozen_tower(cfg)
    in_training = (n - tower if lora is None else adapter) + max(0, critic - tower)
    # a precomputed reference is not loaded, and that of an adapter is the policy without it
    spared = lora is not None or (isinstance(cfg, SLConfig) and cfg.precompute_ref_logp)
    beside = [path for path in alg.frozen_models.values() if path or not spared]
    frozen = sum((count_parameters(path, key="alg", trust_remote_code=trusts) if path else n) * held for path in beside)
    merges = lora is None or lora.merge_on_save
    return MemoryEstimate(
        parameters=n,
        adapter=adapter,
        weights=(n + adapter + critic) * weights / GIB,
        gradients=in_training * gradients / GIB,
        optimizer=in_training * optimizer / GIB,
        frozen=frozen / GIB,
        per_engine=n * held / cfg.rollout.tensor_parallel_size / GIB if isinstance(cfg, RLConfig) else 0.0,
        checkpoint=in_training * (4 + states) / GIB,  # float32 weights and the optimizer
        saved=((n if merges else 0) + adapter + critic) * held / GIB,
    )


def count_frozen_tower(cfg: RunConfig) -> int:
    """Count the parameters that trainer.vision takes out of training."""
    if cfg.trainer.vision == "train":
        return 0
    part = measure_vision(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    return 0 if part is None else part.tower


def count_adapter(path: str, lora: LoraConfig, *, trust_remote_code: bool) -> int:
    """Count the parameters of a new adapter for this model."""
    from modeling.lora import with_adapter

    model = meta_model(path, trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in with_adapter(model, lora, path=path).parameters() if p.requires_grad)


def count_parameters(path: str, *, key: str = "model.path", trust_remote_code: bool) -> int:
    """Count the parameters of the model without allocating them."""
    check_model_folder(path, key=key, trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in meta_model(path, key=key, trust_remote_code=trust_remote_code).parameters())


def find_gpu_gib() -> float | None:
    """Return the memory of one GPU; None where this process sees none."""
    if not count_gpus():
        return None
    import torch

    return torch.cuda.get_device_properties(0).total_memory / GIB  # unlike mem_get_info it takes none itself


def find_machine_gib() -> float:
    """Return the memory of the machine, or of its control group where that has less."""
    import psutil

    total: int = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return (total if text == "max" else min(total, int(text))) / GIB
