"""The distributed trainer: DeepSpeed ZeRO 0 to 3 behind the reference trainer's interface. One process per rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algs.base import Algorithm
from configs.schema import ModelConfig, TrainerConfig
from core.errors import RunStopped
from core.types import Batch, Column, Policy
from trainers.forward import forward, layout_for
from trainers.models import load_model
from trainers.optimizer import make_optimizer, schedule_of
from trainers.reference import frozen, names_in_buckets
from trainers.step import measure, probe, score_columns, train_step


class DeepSpeedTrainer:
    """One rank. Every method is called on all ranks at once.

    torch.distributed must be reachable through MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE.
    """

    def __init__(
        self,
        model: ModelConfig,
        cfg: TrainerConfig,
        alg: Algorithm,
        *,
        temperature: float,
        total_updates: int,
        reference: bool = False,
    ):
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        on_gpu = torch.cuda.is_available()
        deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)
        self.device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        self.ranks = torch.distributed.get_world_size()
        self.cfg, self.alg, self.temperature = cfg, alg, temperature
        self.model = load_model(
            model.path,
            dtype=model.dtype,
            attention=model.attention,
            gradient_checkpointing=cfg.gradient_checkpointing,
        )
        self.bytes = {name: p.nbytes for name, p in self.model.named_parameters()}  # ZeRO-3 will hide them
        self.layout = layout_for(cfg.layout, self.model)
        optimizer = make_optimizer(cfg, [p for p in self.model.parameters() if p.requires_grad])
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=deepspeed_config(cfg, model.dtype)
        )
        self.reference = frozen(model).to(self.device) if reference else None
        self.schedule = schedule_of(cfg, total_updates)
        self.updates_done = self.skipped_in_a_row = 0
        self.gradient_sum = torch.zeros((), device=self.device)
        for p in self.model.parameters():
            if p.requires_grad:
                p.register_hook(self._see_gradient)

    def step(self, updates: list[list[Batch]]) -> dict[str, float]:
        return train_step(
            self, [[b.to(self.device) for b in micro] for micro in updates], max_skipped=self.cfg.max_skipped_updates
        )

    def measure(self, micro: list[Batch]) -> dict[str, float]:
        return measure(self, [b.to(self.device) for b in micro])

    def score(self, micro: list[Batch], columns: frozenset[Column]) -> list[dict[Column, Tensor]]:
        return score_columns(self, [b.to(self.device) for b in micro], columns)

    def probe(self, token_ids: list[int]) -> list[float]:
        return probe(self, token_ids)

    def forward(self, batch: Batch, *, temperature: float | None = None) -> Policy:
        return forward(
            self.engine,
            self.model,
            batch,
            layout=self.layout,
            temperature=temperature or self.temperature,
            entropy=self.alg.needs_entropy,
        )

    def forward_reference(self, batch: Batch) -> Policy:
        assert self.reference is not None
        return forward(self.reference, self.reference, batch, layout=self.layout, temperature=self.temperature)

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed averages gradients over ranks; weights are shares of the whole update, so the sum is wanted."""
        self.engine.backward(loss * self.ranks)

    def gradients_are_finite(self) -> bool:
        """Our own check, on every rank's gradients as they came out of autograd, before they are reduced."""
        bad = self.add_up((~torch.isfinite(self.gradient_sum)).double())
        self.gradient_sum.zero_()
        return bad.item() == 0

    def _see_gradient(self, grad: Tensor) -> None:
        self.gradient_sum += grad.sum(dtype=torch.float32)

    def update(self, *, lr: float, apply: bool) -> float:
        """Clip and step, or throw the gradients away; returns the norm before clipping, not finite if thrown away."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.cfg.zero_stage == 0:
            norm = self._norm_without_zero()
            if apply and math.isfinite(norm):
                self.engine.step()
            else:
                self.engine.zero_grad()
            return norm
        self.engine.step()  # ZeRO 1 to 3 throw a gradient away by themselves whose norm is not finite
        if self.engine.was_step_applied() and not apply:
            raise RunStopped(
                "DeepSpeed applied an update whose gradient was not finite on some rank: "
                "the weights can no longer be trusted"
            )
        return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else math.inf

    def _norm_without_zero(self) -> float:
        """ZeRO-0 keeps no norm, and would reduce its gradients in step(): reduce them now, and not again."""
        self.engine.buffered_allreduce_fallback()
        self.engine.enable_backward_allreduce = False
        return float(nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))

    def add_up(self, values: Tensor) -> Tensor:
        total = values.to(self.device)
        torch.distributed.all_reduce(total)
        return total.to(values.device)

    def weights(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Every tensor once, whole, in buckets of at most `max_bytes` (one tensor at least).

        With ZeRO-3 every rank must run through all of it, and a bucket lives until the next is asked for.
        """
        import deepspeed

        named = dict(self.model.named_parameters())
        for names in names_in_buckets(self.bytes, max_bytes):
            held = [named[n] for n in names]
            with deepspeed.zero.GatheredParameters(held, enabled=self.cfg.zero_stage == 3):
                yield [(n, p.detach()) for n, p in zip(names, held, strict=True)]

    def open_sync(self, address: str, timeout_s: float, over_nccl: bool) -> int:
        """Rank 0 listens for engines at `address`; returns the port."""
        from rollouts.weight_sync import NcclSender, WeightSender

        self.sender = (NcclSender if over_nccl else WeightSender)(timeout_s=timeout_s)
        return self.sender.open(address)

    def join_sync(self, members: int) -> None:
        """Rank 0 waits until every engine has joined."""
        self.sender.join(members=members)

    def send_weights(self, max_bytes: int) -> dict[str, int] | None:
        """Stream the weights to the engines; rank 0 returns the fingerprint of what it sent."""
        stream = self.weights(max_bytes)
        if torch.distributed.get_rank() == 0:
            return self.sender.send(stream)
        for _ in stream:  # gathering a partitioned parameter takes every rank
            pass
        return None

    def state(self) -> Tensor:
        """All weights as one float32 vector on the CPU, for tests."""
        return torch.cat([t.flatten().float().cpu() for bucket in self.weights(2**28) for _, t in bucket])

    def save(self, folder: Path) -> None:
        """In Hugging Face format, from rank 0; the other ranks take part in gathering."""
        state = {name: tensor.to("cpu", copy=True) for bucket in self.weights(2**28) for name, tensor in bucket}
        if torch.distributed.get_rank() == 0:
            self.model.save_pretrained(folder, state_dict=state)
        torch.distributed.barrier()


def deepspeed_config(cfg: TrainerConfig, dtype: str) -> dict[str, Any]:
    """DeepSpeed's own configuration, from ours. `step()` is the boundary of accumulation, so no count appears."""
    stage: dict[str, Any] = {"stage": cfg.zero_stage}
    if cfg.zero_stage < 2:
        stage["overlap_comm"] = False  # refused for stages 0 and 1 when step() is the boundary
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": cfg.max_grad_norm,  # DeepSpeed's default is 1.0, not off
        "zero_optimization": stage | cfg.deepspeed.get("zero_optimization", {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
        **{key: value for key, value in cfg.deepspeed.items() if key != "zero_optimization"},
    }
