"""How much memory a run holds, and how much there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from driver.start.devices import count_gpus

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
