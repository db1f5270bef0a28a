"""From a configuration to the objects of a run: the only factory. What is built where is decided here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from algs.base import Algorithm
from configs.schema import ModelConfig, TrainerConfig
from core.cluster import Cluster, Local, Place, Resources, Workers
from core.errors import UserError
from core.loading import FileSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """All a trainer process needs to know; it loads the algorithm's file itself and checks its hash."""

    model: ModelConfig
    trainer: TrainerConfig
    alg_spec: FileSpec
    alg: dict[str, Any]
    temperature: float
    total_updates: int
    seed: int


def build_trainer(place: Place | None, plan: TrainerPlan) -> Any:
    """A DeepSpeed rank at its place; without a place, the reference trainer in this process."""
    import torch

    from algs import load_algorithm

    alg = load_algorithm(plan.alg_spec, plan.alg)
    torch.manual_seed(plan.seed)
    settings = dict(
        temperature=plan.temperature, total_updates=plan.total_updates, reference="ref_logp" in alg.needs
    )
    if place is None:
        from trainers.reference import ReferenceTrainer

        return ReferenceTrainer(plan.model, plan.trainer, alg, **settings)
    from trainers.deepspeed import DeepSpeedTrainer

    os.environ |= {
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": "0",  # Ray shows each actor its own device only
    }
    if (cores := os.environ.get("OMP_NUM_THREADS")) is not None:
        torch.set_num_threads(int(cores))
    return DeepSpeedTrainer(plan.model, plan.trainer, alg, **settings)


async def start_trainers(cluster: Cluster | None, plan: TrainerPlan, *, timeout_s: float) -> Workers:
    if cluster is None:
        return Local(build_trainer(None, plan))
    ranks = plan.trainer.ranks
    on_gpu = gpus_here() > 0
    threads = None if on_gpu else max(1, (os.cpu_count() or 1) // ranks)
    return await cluster.spawn(
        "trainer", ranks, build_trainer, plan, resources=Resources(gpus=int(on_gpu), threads=threads), timeout_s=timeout_s
    )


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()
