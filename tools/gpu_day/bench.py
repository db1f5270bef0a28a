"""Place where the rows of a GPU day run: device, folder, models, samples, and comparisons with a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from algs.sft import SFT
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.types.samples import Batch
from data_feeds.packing.batches import micro_batches
from tools.benchmarks.random_task import QWEN3_0_6B, make_groups, save_model
from tools.benchmarks.train_throughput import SMALL
from tools.gpu_day.rows import CheckFailed
from trainers.local import LocalTrainer
from trainers.trainer import Trainer

if TYPE_CHECKING:
    from unit_tests.helpers.pretend_cuda import PretendDevice

SHAPE: dict[str, Any] = QWEN3_0_6B | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
"""Shape of the models that are compared."""
BOUND = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest difference of an update, as a share of its norm, from that of a CPU in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Place where a row runs."""

    device: str
    """cuda or cpu."""
    folder: Path
    """Folder for models and data, which the rows make."""
    small: bool = False
    """True for sizes that a CPU can afford."""
    pretend: PretendDevice | None = None
    """Counts of the pretend CUDA device, where the row is rehearsed on it."""

    def make_model(self, dtype: str) -> str:
        """Return the folder of a random model of SHAPE in this dtype."""
        return self._make(f"model_{dtype}", SHAPE, dtype)

    def make_large_model(self) -> str:
        """Return the folder of a random model of Qwen3-0.6B's shape in bfloat16; in a rehearsal of a small one."""
        return self._make("model_large", SMALL if self.small else QWEN3_0_6B, "bfloat16")

    def _make(self, name: str, shape: dict[str, Any], dtype: str) -> str:
        path, unfinished = self.folder / name, self.folder / f"{name}.part"
        if not path.exists():
            # a row that is ended here must not leave half a model to the next one
            shutil.rmtree(unfinished, ignore_errors=True)
            save_model(unfinished, shape, dtype=getattr(torch, dtype))
            unfinished.rename(path)
        return str(path)

    def measure_peak_mib(self) -> float | None:
        """Return the largest memory that torch has allocated on the GPU; None without, or in other processes."""
        return (torch.cuda.max_memory_allocated() / 2**20 or None) if self.device == "cuda" else None


@contextmanager
def pretend_if_possible(wanted: bool) -> Generator[PretendDevice | None]:
    """Let torch have the pretend CUDA device, if it is wanted and this machine can have it."""
    if wanted and find_spec("pytest") is not None:
        from unit_tests.helpers.pretend_cuda import COMPILER, pretend_cuda

        if COMPILER and not torch.backends.cuda.is_built():
            with pretend_cuda() as device:
                yield device
            return
    yield None


class TrainerOn(LocalTrainer):
    """Local trainer on a device of the caller's choice."""

    def __init__(self, device: str, path: str, dtype: str, *, attention: str = "auto", layout: str = "auto") -> None:
        model: Any = ModelConfig.model_validate({"path": path, "dtype": dtype, "attention": attention})
        given = {"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 0.0, "layout": layout}
        cfg = TrainerConfig.model_validate(given)
        Trainer.__init__(self, model, cfg, SFT(), device=device, temperature=0.9, total_updates=10)

    def make_update(self, batches: list[Batch]) -> Tensor:
        """Train on the batches; return by how much each weight has changed."""
        before = self.flatten_weights()
        self.step([batches])
        return before - self.flatten_weights()


def make_batches(max_tokens: int, **how: Any) -> list[Batch]:
    """Return three groups of four samples that share a prompt, in micro-batches."""
    vocabulary = int(SHAPE["vocab_size"])
    groups = make_groups(2, 4, prompt=24, response=9, vocabulary=vocabulary)
    groups += make_groups(1, 4, prompt=11, response=30, vocabulary=vocabulary)
    [batches] = micro_batches(groups, "token", max_tokens, **how)
    return batches


def compare(what: str, got: Tensor, want: Tensor, bound: float) -> float:
    """Return the norm of the difference as a share of that of `want`. Raises CheckFailed above `bound`."""
    # float64 on the CPU, so that the comparison adds no rounding of its own
    gap = float((got.double().cpu() - want.double().cpu()).norm() / want.double().cpu().norm())
    if not gap <= bound:  # a NaN is no number below the bound
        raise CheckFailed(f"{what}: the difference is {gap:.2%}, and at most {bound:.2%} is expected")
    return gap
