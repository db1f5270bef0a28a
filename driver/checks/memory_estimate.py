"""Estimated memory of a run, and available memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core.gpus import GIB, find_gpus
from core.timing.deadlines import GPU_CHECK_TIMEOUT_S
from driver.start.devices import count_gpus

CUDA_GIB = 0.75
"""GPU memory of a process beside its tensors: the context, and workspaces of the libraries. An H100 took 0.74."""
GRAPHS_GIB = 1.0
"""GPU memory of vLLM's CUDA graphs and context, which stays while it sleeps. Qwen3-0.6B on an H100 kept 0.56."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesEach:
    """Bytes of one trainer rank for one parameter."""

    weights: float
    """Weight of a parameter in training."""
    idle: float
    """Weight of a frozen parameter in a trained model."""
    reference: float
    """Weight of a parameter in a frozen model."""
    moving: float
    """Weight of a parameter in a teacher that follows the policy, in float32."""
    gradients: float
    optimizer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of a run in GiB, without activations, caches and the processes themselves."""

    parameters: int
    """Parameters of the model, without an adapter."""
    adapter: int
    quantized: int
    """Parameters that are kept in four bits."""
    weights: float
    """Weights of a trainer rank; the next three fields are also per rank."""
    gradients: float
    optimizer: float
    frozen: float
    buckets: float
    """DeepSpeed's buffer for gradients that are reduced together, per rank. On a CPU only what is used counts."""
    per_engine: float
    """Weights of an engine's rank; 0 without engines."""
    checkpoint: float
    """Size of a checkpoint, all ranks together."""
    saved: float
    """Size of the saved model."""

    @property
    def per_rank(self) -> float:
        """GiB of a trainer rank."""
        return self.weights + self.gradients + self.optimizer + self.frozen


def estimate_engine_gib(gpu_gib: float, *, utilization: float, enforce_eager: bool) -> float:
    """Return the memory of a GPU that a rank of vLLM takes: weights and cache fill its share, graphs are beyond it.

    >>> estimate_engine_gib(80.0, utilization=0.85, enforce_eager=True)
    68.0
    """
    return utilization * gpu_gib + (0.0 if enforce_eager else GRAPHS_GIB)


def find_gpu_gib() -> float | None:
    """Return the memory of the smallest GPU in GiB; None if this process sees no GPU, or cannot use it."""
    # torch would start CUDA in this process, and counts GPUs that it cannot use
    devices = find_gpus(timeout_s=GPU_CHECK_TIMEOUT_S).devices if count_gpus() else ()
    return min((gpu.total_gib for gpu in devices), default=None)


def find_machine_gib() -> float:
    """Return the memory of the machine in GiB, or the limit of its control group if that is lower."""
    import psutil

    # In a container psutil reports the whole machine; only the control group knows the limit.
    total: int = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return (total if text == "max" else min(total, int(text))) / GIB
