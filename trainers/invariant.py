"""Trainer with forward passes in fixed order, for `rollout.batch_invariant`, and the observer of its first pass."""

from __future__ import annotations

from typing import Any, Unpack

from algs.base import Algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.types.arrays import Floats
from core.types.samples import Batch, Policy
from modeling.attention import FIXED_ORDER
from modeling.fixed_order import fixed_order
from trainers.learner import TrainerSettings
from trainers.local import LocalTrainer
from trainers.observers import BatchSeen, Observer


class InvariantTrainer(LocalTrainer):
    """Local trainer whose log-probabilities do not depend on the rest of a micro-batch, to the bit."""

    def __init__(self, model: ModelConfig, cfg: TrainerConfig, alg: Algorithm, **settings: Unpack[TrainerSettings]):
        super().__init__(model.model_copy(update={"attention": FIXED_ORDER}), cfg, alg, **settings)

    def forward(self, batch: Batch, **settings: Any) -> Policy:
        with fixed_order():
            return super().forward(batch, **settings)


class FirstPass(Observer):
    """Log-probabilities of a step's first update, which were computed before the weights changed."""

    def __init__(self, _trainer: object):
        self.logp: list[Floats] = []

    def begin_step(self) -> None:
        self.logp, self.n_updates = [], 0

    def begin_update(self) -> None:
        self.n_updates += 1

    def on_batch(self, seen: BatchSeen) -> None:
        if self.n_updates == 1 and seen.policy is not None:
            self.logp.append(seen.policy.logp.numpy())

    def take(self) -> list[Floats]:
        """Return the log-probabilities of the last step, [M] per micro-batch."""
        return self.logp
