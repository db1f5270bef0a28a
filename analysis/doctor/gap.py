"""Gap between the log-probabilities of engine and trainer on samples of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from algs.ops import importance_ratio
from core.types.arrays import Floats
from core.types.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Difference of log-probabilities over the sampled tokens, engine and trainer, in nats."""

    mean: float
    """Mean absolute difference, as train/mismatch/abs_logp."""
    p99: float
    """99 % of the tokens differ by less."""
    largest: float
    kl: float
    """k3 estimate of KL(engine || trainer), as train/mismatch/kl."""
    tokens: int

    def __str__(self) -> str:
        return f"{self.mean:.2g} nats"

    def describe(self) -> str:
        """Return the numbers as a line."""
        return f"mean {self.mean:.2g}, p99 {self.p99:.2g}, largest {self.largest:.2g}, KL {self.kl:.2g} nats"


def measure_gap(samples: Sequence[Sample]) -> Gap:
    """Compare rollout_logp with the column prox_logp on the sampled tokens."""
    rollout, trainer = collect(samples)
    apart = np.abs(rollout - trainer)
    rho = importance_ratio(torch.from_numpy(trainer), torch.from_numpy(rollout))
    return Gap(
        mean=float(apart.mean()),
        p99=float(np.quantile(apart, 0.99)),
        largest=float(apart.max()),
        # k3 = rho - 1 - log rho: never negative, and unbiased for tokens that the engine sampled
        kl=float((rho - 1 - rho.log()).mean()),
        tokens=len(apart),
    )


def collect(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """Return the log-probabilities of all sampled tokens by engine and trainer, [T] float64 each."""
    rollout = np.concatenate([s.rollout_logp[s.loss_mask] for s in samples]).astype(np.float64)
    trainer = np.concatenate([s.columns["prox_logp"][s.loss_mask] for s in samples]).astype(np.float64)
    return rollout, trainer
