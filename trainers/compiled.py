"""Blocks of a model compiled by torch.compile, and metrics of the compiling.

A block's `forward` is replaced, and not the block: parameters keep their names, and hooks stay outside. So do those
with which FSDP2 and ZeRO-3 gather a block, and the second pass of gradient checkpointing. Lengths are symbols from the
first pass on, so that no length is compiled again. Attention over packed rows is an opaque call,
because its code depends on the lengths of the sequences. A block is therefore compiled in pieces: norms, projections
and rotary embedding before the call, and the rest after it. Layers of the same class share compiled code.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from configs.trainer_schema import ModelConfig, TrainerConfig
from core.compile_metrics import COMPILE_COUNT, COMPILE_SECONDS
from core.errors import UserError
from core.patches import watch_compilation
from modeling.attention import BY_SEQUENCE, attend_by_sequence
from modeling.blocks import find_blocks
from modeling.layout_probe import find_probe
from trainers.deepspeed_masters import find_offload
from trainers.observers import Observer

KEY, WITHOUT = "trainer.compile=true", "leave it out"


def check_compile(cfg: TrainerConfig, model: ModelConfig, *, is_sharded: bool, replays_routes: bool) -> None:
    """Raise UserError if the recipe's blocks cannot be compiled on this machine. is_sharded: the trainer is on Ray."""
    adapts_zero_3 = model.lora is not None and cfg.strategy == "deepspeed" and cfg.zero_stage == 3
    not_compared = {
        "trainer.gradient_checkpointing": cfg.gradient_checkpointing,
        "trainer.sequence_parallel": cfg.sequence_parallel > 1,
        "trainer.offload": cfg.offload,
        "model.lora and trainer.zero_stage=3": adapts_zero_3,
        **({away: True} if (away := find_offload(cfg)) else {}),
    }
    if is_sharded and (found := [key for key, is_set in not_compared.items() if is_set]):
        raise UserError(
            f"{KEY} with backend: ray has not been compared with an uncompiled run for {found[0]}: leave one of the "
            "two out"
        )
    if model.quantization is not None:
        raise UserError(
            f"{KEY}, and the layers of model.quantization={model.quantization} dequantise weights by calls that cannot "
            f"be compiled: {WITHOUT}"
        )
    if replays_routes:
        raise UserError(f"{KEY}, and rollout.router_replay reads choices inside of the blocks: leave one of them out")
    check_compiler()


def check_compiler() -> None:
    """Raise UserError if this machine lacks what torch.compile builds kernels with."""
    wanted = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(wanted) is None:
        raise UserError(
            f"{KEY} requires a C++ compiler, and there is no {wanted}: install it, name another in the environment "
            f"variable CXX, or {WITHOUT}"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise UserError(
            f"{KEY} requires Python's headers, and {headers} has no Python.h: install them (python3-dev), or {WITHOUT}"
        )


def compile_blocks(models: Iterable[nn.Module]) -> None:
    """Compile the blocks of the models' language parts in place, at their first call.

    Raises UserError for a model with layers that run by path, and for one whose blocks are not known.
    """
    from transformers import AttentionInterface

    check_compiler()
    AttentionInterface.register(BY_SEQUENCE, torch.compiler.disable(attend_by_sequence))
    for model in dict.fromkeys(models):  # several teachers may be the same frozen model
        hf: Any = model
        probe = find_probe(model)
        if probe.by_path:
            raise UserError(
                f"{KEY}, and the {probe.by_path} of this {hf.config.model_type} model run path by path, in calls that "
                f"depend on a row's lengths: {WITHOUT}"
            )
        for block in find_compiled_blocks(model):
            block.forward = torch.compile(block.forward, dynamic=True)


def find_compiled_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model's language part."""
    hf: Any = model
    base: Any = hf.get_base_model() if hasattr(model, "peft_config") else model
    return find_blocks(base.get_decoder(), use=f"{KEY} compiles", fix=WITHOUT)


class Rank(Protocol):
    """Trainer rank whose compilations are counted."""

    device: str

    def find_largest(self, value: Tensor) -> Tensor: ...


class Compilations:
    """Counter of all compilations of this process."""

    def __init__(self) -> None:
        self.count, self.seconds, self.began = 0, 0.0, 0.0

    def begin(self, _: Any) -> None:
        self.began = time.perf_counter()

    def end(self, _: Any) -> None:
        self.count += 1
        self.seconds += time.perf_counter() - self.began


@cache
def count_compilations() -> Compilations:
    """Return the counter of this process. It is never unregistered, so there is only one, which holds no trainer."""
    counter = Compilations()
    watch_compilation(counter.begin, counter.end)
    return counter


class CompileMetrics(Observer):
    """Compilations since the last step, of the rank with the most of them."""

    def __init__(self, rank: Rank):
        self.rank, self.counter = rank, count_compilations()
        self.count, self.seconds = self.counter.count, self.counter.seconds

    def finish(self) -> dict[str, float]:
        found = [self.counter.count - self.count, self.counter.seconds - self.seconds]
        self.count, self.seconds = self.counter.count, self.counter.seconds
        own = torch.tensor(found, dtype=torch.float64, device=self.rank.device)
        count, seconds = self.rank.find_largest(own).tolist()
        return {COMPILE_COUNT: count, COMPILE_SECONDS: seconds}
