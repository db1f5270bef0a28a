"""Trainers on Ray actors, and one update of them."""

import asyncio
import pickle
from typing import Any

import pytest
import torch

from algs import find_algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.cluster.capacity import Resources
from core.cluster.workers import Local
from core.types.allowed_tokens import EVERY_TOKEN
from data_feeds.packing.batches import micro_batches
from driver.start.trainers import TrainerPlan, build_trainer
from trainers.trainer import Trainer

FSDP2, OFFLOADED = "fsdp2", "fsdp2, offloaded"
LATER = pytest.mark.verify
SGD = {"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 0.0}
SMALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""Settings with which ZeRO-3 shards tensors as small as those of these models too."""
ALONE: dict[tuple[str, str, bytes], tuple[torch.Tensor, torch.Tensor, dict[str, float]]] = {}
"""Weights before and after an update by one process, and its metrics, by model, settings and groups."""


def start_ranks(cluster, n):
    return asyncio.run(cluster.spawn("trainer", n, Nothing, resources=Resources(threads=1), timeout_s=120))


def sharded(stage) -> dict:
    """Return the keys for a ZeRO stage, or for FSDP2."""
    if stage == OFFLOADED:
        return {"strategy": FSDP2, "offload": True}
    return {"strategy": FSDP2} if stage == FSDP2 else {"zero_stage": stage}


class Nothing:
    def __init__(self, place):
        pass


def plan_of(
    path: str,
    *,
    alg=None,
    dtype="float32",
    lora=None,
    quantization=None,
    timeout_s=1800.0,
    attention="sdpa",
    router_replay="off",
    **trainer,
) -> TrainerPlan:
    alg = alg or {"name": "grpo"}
    _, cls = find_algorithm(alg)
    return TrainerPlan(
        model=ModelConfig(path=path, dtype=dtype, attention=attention, lora=lora, quantization=quantization),
        trainer=TrainerConfig(**trainer),
        alg=cls(**alg),
        temperature=0.9,
        total_updates=10,
        seed=0,
        observers={},
        allowed_tokens=EVERY_TOKEN,
        has_ref_logp=False,
        timeout_s=timeout_s,
        router_replay=router_replay,
        batch_invariant=False,
        shares_device=False,
    )


async def trainers_of(ranks, plan: TrainerPlan):
    if ranks is None:
        return Local(build_trainer(None, plan))
    workers = ranks[plan.trainer.ranks]
    await workers.build_workers(build_trainer, plan)
    return workers


async def run(ranks, plan: TrainerPlan, groups, *, max_tokens: int, steps: int = 1):
    """Weights after `steps` updates and the metrics of the last, from the trainers of `plan`."""
    trainers = await trainers_of(ranks, plan)
    how = {"padded": plan.trainer.layout != "packed", "share_prefixes": plan.model.attention == "auto"}
    size = plan.trainer.sequence_parallel  # ranks with the same rows
    of_groups = micro_batches(groups, "token", max_tokens, ranks=len(trainers) // size, **how)
    for _ in range(steps):
        metrics = await trainers.scatter(Trainer.step, [[micro] for micro in of_groups for _ in range(size)])
    states = await trainers.call_all(Trainer.flatten_weights)
    assert all(m == metrics[0] for m in metrics), f"every rank reports the same: {metrics}"
    assert all(torch.equal(s, states[0]) for s in states), "every rank holds the same weights"
    return states[0], metrics[0]


def start_of(path, alg=None, dtype="float32") -> torch.Tensor:
    return build_trainer(None, plan_of(path, alg=alg, dtype=dtype)).flatten_weights()


def check_update(workers, path, groups, *, max_tokens: int, same: dict[str, Any], tolerance=1e-5, **how):
    """Compare an update by trainers on Ray (`same | how`) with that of one process (`same`); return its metrics.

    Weights and metrics are compared; `same` and `how` are keys of plan_of.
    """
    key = path, repr(sorted(same.items())), pickle.dumps(groups)
    if key not in ALONE:
        alone = plan_of(path, **SGD | same)
        start = build_trainer(None, alone).flatten_weights()
        ALONE[key] = (start, *asyncio.run(run(None, alone, groups, max_tokens=10_000)))
    start, want, metrics = ALONE[key]
    got, got_metrics = asyncio.run(run(workers, plan_of(path, **SGD | same | how), groups, max_tokens=max_tokens))
    assert len(start) == len(want) and (got - want).norm() < tolerance * (want - start).norm()
    assert got_metrics == pytest.approx(metrics, rel=max(1e-4, tolerance), abs=max(1e-5, 0.01 * tolerance))
    return got, metrics


def alg_of(name: str) -> dict[str, Any]:
    return {"name": name} | ({"critic_lr": 0.5} if name == "ppo" else {})
