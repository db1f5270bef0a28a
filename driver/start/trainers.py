"""Factories of trainers."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from algs.base import Algorithm
from configs.schema import RLConfig, RunConfig, SLConfig
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.cluster.capacity import Role
from core.cluster.ray_workers import Cluster
from core.cluster.workers import Local, RankInfo, Workers
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.routes import RouterReplay

if TYPE_CHECKING:
    from trainers.learner import TrainerSettings
    from trainers.observers import ObserverFactory
    from trainers.trainer import Trainer

from driver.start.devices import count_gpus, share_machine, shares_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """Settings of a trainer process."""

    model: ModelConfig
    trainer: TrainerConfig
    alg: Algorithm
    temperature: float
    total_updates: int
    seed: int
    observers: Mapping[str, ObserverFactory]
    """Observer factories, by the recipe key that enables them."""
    allowed_tokens: AllowedTokens
    has_ref_logp: bool
    router_replay: RouterReplay
    batch_invariant: bool
    shares_device: bool
    """Colocation: the trainer is offloaded while an engine uses the device."""
    timeout_s: float
    """Deadline of the ranks' collectives."""


if count_gpus() == 0:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for one, and warns


def build_trainer(info: RankInfo | None, plan: TrainerPlan) -> Trainer:
    """Return a rank of the distributed trainer; without `info`, the local trainer in this process."""
    trainer = _make_trainer(info, plan)
    if plan.shares_device:
        from trainers.offload.offloaded_trainer import OffloadedTrainer

        trainer.offloaded = OffloadedTrainer(trainer)
    return trainer


def _make_trainer(info: RankInfo | None, plan: TrainerPlan) -> Trainer:
    import torch

    # New adapters and heads are drawn from it, so that every rank starts with the same weights.
    torch.manual_seed(plan.seed)
    settings: TrainerSettings = {
        "temperature": plan.temperature,
        "total_updates": plan.total_updates,
        "observers": plan.observers,
        "allowed_tokens": plan.allowed_tokens,
        "has_ref_logp": plan.has_ref_logp,
        "router_replay": plan.router_replay,
    }
    if info is None:
        # Imported where it is used, so that DeepSpeed loads only in runs with it.
        from trainers.invariant import InvariantTrainer
        from trainers.local import LocalTrainer

        made = InvariantTrainer if plan.batch_invariant else LocalTrainer
        return made(plan.model, plan.trainer, plan.alg, **settings)
    os.environ |= {
        "MASTER_ADDR": info.address,
        "MASTER_PORT": str(info.port),
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.size),
        "LOCAL_RANK": "0",  # Ray shows each actor its own device only
    }
    if plan.trainer.strategy == "fsdp2":
        from trainers.fsdp2 import FsdpTrainer

        return FsdpTrainer(plan.model, plan.trainer, plan.alg, timeout_s=plan.timeout_s, **settings)
    from trainers.deepspeed import DeepSpeedTrainer

    return DeepSpeedTrainer(plan.model, plan.trainer, plan.alg, timeout_s=plan.timeout_s, **settings)


def plan_trainer(
    cfg: RunConfig,
    alg: Algorithm,
    *,
    observers: Mapping[str, ObserverFactory] = MappingProxyType({}),
    allowed_tokens: AllowedTokens = EVERY_TOKEN,
) -> TrainerPlan:
    """Return the plan of a run's trainer ranks. observers: factories by the recipe key that enables them."""
    compiled: dict[str, ObserverFactory] = {}
    if cfg.trainer.compile:
        from trainers.compiled import CompileMetrics

        compiled["compile"] = CompileMetrics
    return TrainerPlan(
        model=cfg.model,
        trainer=cfg.trainer,
        alg=alg,
        # The log-probabilities must be those of the distribution that the engine sampled from.
        temperature=cfg.rollout.temperature if isinstance(cfg, RLConfig) else 1.0,
        total_updates=cfg.total_updates,
        seed=cfg.seed,
        observers={**observers, **compiled},
        allowed_tokens=allowed_tokens,
        has_ref_logp=isinstance(cfg, SLConfig) and cfg.precompute_ref_logp,
        router_replay=cfg.rollout.router_replay if isinstance(cfg, RLConfig) else "off",
        batch_invariant=isinstance(cfg, RLConfig) and cfg.rollout.batch_invariant,
        shares_device=shares_devices(cfg),
        timeout_s=cfg.timeout_s,
    )


def plan_trainer_role(cfg: RunConfig) -> Role:
    return Role(name="trainer", n=cfg.trainer.ranks, resources=share_machine(cfg, cfg.trainer.ranks, gpus=1))


async def start_trainers(cluster: Cluster | None, cfg: RunConfig, plan: TrainerPlan) -> Workers[Trainer]:
    """Start the trainer ranks; return when all have loaded their models."""
    if cluster is None:
        return Local(build_trainer(None, plan))
    role = plan_trainer_role(cfg)
    return await cluster.spawn(
        role.name, role.n, build_from_bytes, pickle.dumps(plan), resources=role.resources, timeout_s=cfg.timeout_s
    )


def build_from_bytes(info: RankInfo, plan: bytes) -> Trainer:
    """Unpickle the plan and build a rank. Unpickling here, not in Ray, makes a changed user file a UserError."""
    return build_trainer(info, pickle.loads(plan))
