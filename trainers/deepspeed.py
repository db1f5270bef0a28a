"""Distributed trainer with DeepSpeed, ZeRO stages 0 to 3, behind the interface of the local trainer."""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Callable, Generator
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from algs.base import Algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import RunStopped
from core.gc_control import without_gc
from core.patches import find_hpzero_group, reduce_with_gloo
from core.types.weights import Bucket, ExportScope
from modeling.file_names import WeightExport, cut_buckets
from modeling.load import DTYPES
from trainers.checkpoint.copies import load_tensors, save_tensors
from trainers.checkpoint.state import reading
from trainers.compiled import find_compiled_blocks
from trainers.deepspeed_masters import list_masters, refuse_offload, show_masters
from trainers.distributed import DistributedTrainer
from trainers.learner import Learner
from trainers.models import ModelLoader
from trainers.optimizer import make_optimizer
from trainers.parameter_groups import group_parameters, set_lr
from trainers.references import clear_moments
from trainers.row_shards import shard_rows, unite_rows


class DeepSpeedTrainer(DistributedTrainer):
    """Trainer rank with DeepSpeed."""

    def start_library(self, timeout: timedelta) -> None:
        with without_gc():
            import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        reduce_with_gloo()
        backend = torch.distributed.get_backend()
        deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)

    def get_file_settings(self) -> dict[str, Any]:
        own = {"trainer.ranks": self.ranks, "trainer.zero_stage": self.cfg.zero_stage}
        return {"backend": "ray", "trainer.strategy": "deepspeed"} | own

    def make_loader(self, model: ModelConfig, alg: Algorithm) -> ModelLoader:
        if self.cfg.zero_stage < 3:
            return super().make_loader(model, alg)
        mesh = init_device_mesh(torch.device(self.device).type, (self.ranks,))
        return ModelLoader(model, self.cfg, alg, place=partial(shard_rows, mesh=mesh))

    def make_learner(self, model: nn.Module) -> Learner:
        self.partition(model)
        if self.cfg.compile and self.cfg.zero_stage == 3:
            gather_by_blocks(model)
        return DeepSpeedLearner(model, self.cfg, self.dtype, self.sum_over_ranks)

    def gather_parameter(self, parameter: Tensor) -> Tensor:
        import deepspeed

        # frozen models are whole on every rank; the base model of an adapter is partitioned
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def partition(self, model: nn.Module) -> None:
        """Partition row-sharded parameters as ZeRO-3 does; DeepSpeed partitions a model that was read whole."""
        config, device = deepspeed_config(self.cfg, self.dtype), torch.device(self.device)
        if unite_rows(model, make_cutter(config), device=device, dtype=DTYPES[self.dtype]):
            model.to(device)  # DeepSpeed takes it for done once a parameter is cut


class DeepSpeedLearner:
    """Learner of one model, in a DeepSpeed engine."""

    def __init__(self, model: nn.Module, cfg: TrainerConfig, dtype: str, sum_over_ranks: Callable[[Tensor], Tensor]):
        import deepspeed

        self.model, self.zero_stage, self.sum_over_ranks = model, cfg.zero_stage, sum_over_ranks
        self.cfg = cfg
        self.max_grad_norm, self.may_apply, self.norm = cfg.max_grad_norm, True, math.inf
        self.hidden: list[tuple[Tensor, Tensor | None]] = []
        """Parameters with the gradients that `_hide_gradients` took away."""
        self.exported = WeightExport(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = make_optimizer(cfg, group_parameters(model, cfg, trained))
        if cfg.zero_stage == 0:
            # gradients are reduced by the time that DeepSpeed calls the optimizer, so the norm is computed there
            optimizer.register_step_pre_hook(self._finish_gradients)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config(cfg, dtype)
        )
        if cfg.zero_stage > 0:
            wrapper: Any = self.optimizer  # of ours, or of the one by which ZeRO replaced it
            wrapper.optimizer.register_step_pre_hook(self._hide_gradients)
            wrapper.optimizer.register_step_post_hook(self._show_gradients)
        self.module = self.engine
        self.ranks = torch.distributed.get_world_size()
        # hooks see every gradient before DeepSpeed reduces it; a norm is not available at every stage
        self.gradient_sum = torch.zeros((), device=self.engine.device)
        for p in model.parameters():
            if p.requires_grad:
                p.register_hook(self._see_gradient)

    def backward(self, loss: Tensor) -> None:
        """Run backward on loss x ranks: DeepSpeed averages gradients over ranks, and the update needs their sum."""
        self.engine.backward(loss * self.ranks)

    def has_finite_gradients(self) -> bool:
        """Check every rank's gradients as they came out of autograd, before they are reduced."""
        bad = self.sum_over_ranks((~torch.isfinite(self.gradient_sum)).double())
        self.gradient_sum.zero_()
        return bad.item() == 0

    def _see_gradient(self, grad: Tensor) -> None:
        self.gradient_sum += grad.sum(dtype=torch.float32)

    def update(self, *, lr: float, apply: bool) -> float:
        set_lr(self.optimizer, lr)
        self.may_apply = apply
        self.engine.step()  # discards a gradient whose norm is not finite
        if self.zero_stage == 0:
            return self.norm
        is_made = apply and self.engine.was_step_applied()
        return float(self.engine.get_global_grad_norm()) if is_made else math.inf

    def _finish_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Clip the reduced gradients and record the norm, or drop gradients that must not be applied.

        A pre-step hook of the optimizer for ZeRO-0, which reports no norm and would apply a gradient that is not
        finite.
        """
        from deepspeed.runtime.utils import clip_grad_norm_

        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        self.norm = norm if self.may_apply and math.isfinite(norm) else math.inf
        if self.norm == math.inf:
            optimizer.zero_grad()
        elif self.max_grad_norm > 0:
            clip_grad_norm_(parameters, self.max_grad_norm)

    def _hide_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hide gradients that must not be applied.

        A pre-step hook of the optimizer for ZeRO, which discards a gradient that is not finite, and would apply a
        finite one when that of the other model is not.
        """
        if not self.may_apply:
            self.hidden = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
            for p, _grad in self.hidden:
                p.grad = None

    def _show_gradients(self, *_: Any) -> None:
        """Undo `_hide_gradients`: when weights are offloaded, ZeRO keeps the gradient's memory for the next update."""
        for p, grad in self.hidden:
            p.grad = grad
        self.hidden = []

    def export_weights(self, max_bytes: int, scope: ExportScope = "whole") -> Generator[Bucket]:
        """Yield buckets; with ZeRO-3 every rank must consume all of them, and a bucket is valid until the next one."""
        import deepspeed

        for groups in self.exported.split(scope, max_bytes):
            held = [p for group in groups for p in group.parameters if isinstance(p, nn.Parameter)]
            with deepspeed.zero.GatheredParameters(held, enabled=self.zero_stage == 3):
                yield from cut_buckets(groups, max_bytes)

    def save_state(self, folder: Path) -> None:
        """Write the DeepSpeed checkpoint of this rank, without frozen parameters."""
        self.engine.save_checkpoint(
            str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=True
        )

    def load_state(self, folder: Path) -> None:
        all_trained = all(p.requires_grad for p in self.model.parameters())
        with reading(folder, classes=classes_in_checkpoints()):
            found, _ = self.engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=all_trained)
        if found is None:
            raise RunStopped(f"DeepSpeed finds no checkpoint in {folder}, although the folder is marked as complete")

    def list_masters(self) -> list[Tensor]:
        refuse_offload(self.cfg, "a teacher of alg moves, or trainer.ema is set")
        return list_masters(self.optimizer)

    def show_masters(self) -> None:
        show_masters(self.optimizer)

    def clear_moments(self) -> None:
        clear_moments(self.optimizer)

    def save_copies(self, copies: list[Tensor], folder: Path) -> None:
        save_tensors(copies, folder, rank=torch.distributed.get_rank())

    def load_copies(self, copies: list[Tensor], folder: Path) -> None:
        load_tensors(copies, folder, rank=torch.distributed.get_rank())


def gather_by_blocks(model: nn.Module) -> None:
    """Let ZeRO-3 gather whole blocks.

    Hooks inside a block would cut its code into pieces, and each layer would be compiled for its own hooks.
    """
    from deepspeed.utils import set_z3_leaf_module

    for block in find_compiled_blocks(model):
        set_z3_leaf_module(block, True)


def make_cutter(config: dict[str, Any]) -> Callable[[nn.Parameter], None]:
    """Return a function that shards a full parameter as ZeRO-3 does.

    Collective: every rank calls it for the same parameters in the same order.
    """
    import deepspeed

    first: Any = None

    def cut(parameter: nn.Parameter) -> None:
        nonlocal first
        if first is not None:
            first.convert_to_zero_parameters([parameter])
            return
        holder = nn.ParameterList([parameter])
        # the model before this one may have formed the group
        deepspeed.zero.Init(holder, config_dict_or_path=config, zero_param_parallel_group=find_hpzero_group())
        first = parameter

    return cut


def read_sharded_weights(folder: Path) -> dict[str, Tensor]:
    """Return the float32 weights of a ZeRO-1 to ZeRO-3 checkpoint, merged from the files of all ranks."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with without_gc():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with reading(folder, classes=classes_in_checkpoints()), redirect_stdout(io.StringIO()):  # it talks
        return get_fp32_state_dict_from_zero_checkpoint(
            str(folder.parent), tag=folder.name, exclude_frozen_parameters=True
        )


def read_whole_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a ZeRO-0 checkpoint, which is not sharded."""
    [file] = folder.glob("*model_states.pt")
    with reading(file, classes=classes_in_checkpoints()):
        return torch.load(file, map_location="cpu", weights_only=True)["module"]


def classes_in_checkpoints() -> list[type]:
    """Return the DeepSpeed classes that a checkpoint may contain: settings and offsets, no code."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def deepspeed_config(cfg: TrainerConfig, dtype: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration. `step()` ends the accumulation, so no number of steps is set."""
    stage: dict[str, Any] = {"stage": cfg.zero_stage}
    if cfg.zero_stage < 2:
        stage["overlap_comm"] = False  # refused for stages 0 and 1 when step() is the boundary
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # DeepSpeed's default is 1.0, not off; with ZeRO-0 the gradient is clipped before DeepSpeed would
        "gradient_clipping": cfg.max_grad_norm if cfg.zero_stage else 0.0,
        "zero_optimization": stage | cfg.deepspeed.get("zero_optimization", {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
        **{key: value for key, value in cfg.deepspeed.items() if key != "zero_optimization"},
    }
