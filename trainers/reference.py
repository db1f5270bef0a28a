"""The reference trainer: plain torch, one process, no distributed code. The DeepSpeed trainer is tested against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from algs.base import Algorithm
from configs.schema import ModelConfig, TrainerConfig
from core.types import Batch, Column, Policy
from trainers.forward import forward, layout_for
from trainers.models import load_model
from trainers.optimizer import make_optimizer, schedule_of
from trainers.step import measure, probe, score_columns, train_step


class ReferenceTrainer:
    """Keeps float32 master weights beside a bfloat16 model, as DeepSpeed does; in float32 they are one."""

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
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.cfg, self.alg, self.temperature = cfg, alg, temperature
        self.model = load_model(
            model.path,
            dtype=model.dtype,
            attention=model.attention,
            gradient_checkpointing=cfg.gradient_checkpointing,
        ).to(self.device)
        self.reference = frozen(model).to(self.device) if reference else None
        self.layout = layout_for(cfg.layout, self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.master = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        self.optimizer = make_optimizer(cfg, self.master)
        self.schedule = schedule_of(cfg, total_updates)
        self.updates_done = self.skipped_in_a_row = 0

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
            self.model,
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
        loss.backward()
        for p, m in zip(self.parameters, self.master, strict=True):
            if p is not m and p.grad is not None:  # accumulate in float32, as DeepSpeed does
                m.grad = p.grad.float() if m.grad is None else m.grad + p.grad
                p.grad = None

    def gradients_are_finite(self) -> bool:
        return all(bool(torch.isfinite(m.grad).all()) for m in self.master if m.grad is not None)

    def update(self, *, lr: float, apply: bool) -> float:
        """Clip and step, or throw the gradients away; returns the norm before clipping, not finite if thrown away."""
        norm = nn.utils.get_total_norm([m.grad for m in self.master if m.grad is not None])
        if apply and torch.isfinite(norm):
            if self.cfg.max_grad_norm > 0:
                nn.utils.clip_grads_with_norm_(self.master, self.cfg.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            with torch.no_grad():
                for p, m in zip(self.parameters, self.master, strict=True):
                    if p is not m:
                        p.copy_(m)
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def add_up(self, values: Tensor) -> Tensor:
        return values

    def weights(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Every tensor once, in buckets of at most `max_bytes` (one tensor at least)."""
        named = {name: p.detach() for name, p in self.model.named_parameters()}
        for names in names_in_buckets({n: p.nbytes for n, p in named.items()}, max_bytes):
            yield [(n, named[n]) for n in names]

    def state(self) -> Tensor:
        """All weights as one float32 vector on the CPU, for tests."""
        return torch.cat([t.flatten().float().cpu() for bucket in self.weights(2**28) for _, t in bucket])

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


def frozen(model: ModelConfig) -> nn.Module:
    """The reference model: the weights the run started from."""
    return load_model(model.path, dtype=model.dtype, attention=model.attention).requires_grad_(False)


def names_in_buckets(sizes: dict[str, int], max_bytes: int) -> Iterator[list[str]]:
    """Consecutive names whose sizes add up to at most `max_bytes`; a larger one stands alone."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > max_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names
