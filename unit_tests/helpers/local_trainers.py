"""A trainer in this process, and the gradient of one update."""

from __future__ import annotations

from types import MappingProxyType

import torch

from algs.base import Algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from trainers.local import LocalTrainer

TEMPERATURE = 0.9


def trainer_of(
    path: str,
    alg: Algorithm,
    *,
    dtype="float32",
    attention="sdpa",
    lora=None,
    images="auto",
    settings=MappingProxyType({}),
    **changes,
) -> LocalTrainer:
    """Return a trainer whose update by SGD with learning rate 1 takes the gradient off the weights.

    settings: more of TrainerSettings.
    """
    cfg = TrainerConfig(**{"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 0.0} | changes)
    model = ModelConfig(path=path, dtype=dtype, attention=attention, lora=lora, images=images)
    return LocalTrainer(model, cfg, alg, temperature=TEMPERATURE, total_updates=10, **settings)


def change(path: str, alg: Algorithm, micro, **changes) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the gradient of one update, and its metrics."""
    trainer = trainer_of(path, alg, **changes)
    before = trainer.flatten_weights()
    metrics = trainer.step([micro])
    return before - trainer.flatten_weights(), metrics
