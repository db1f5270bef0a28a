"""M2PO: GRPO on stale samples, without the tokens that moved most (https://arxiv.org/abs/2510.01161).

    v_t   = (log pi_rollout(a_t) - log pi_prox(a_t))^2
    limit = the largest x such that the mean of all v_t <= x is below `threshold`    over the whole update
    A_t   = 0 where v_t > limit

The second moment of the log-ratio bounds how far the samples are from the policy, in both directions. Equal values
share their fate. If no mean is below the threshold, the smallest v stays. A token without an advantage stays in the
mean.

Others: AReaL ranks the tokens of each micro-batch, splits equal values, and counts kept tokens only.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from algs.grpo import GRPO
from core.types.arrays import Floats
from core.types.samples import Group, Sample, ScoredColumn


class M2PO(GRPO):
    threshold: float = Field(0.04, gt=0)
    """Bound of the mean squared log-ratio."""

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        columns: frozenset[ScoredColumn] = frozenset({"prox_logp"})
        return super().required_columns | columns

    def prepare_update(self, groups: list[Group]) -> list[Group]:
        moved = [measure_moved(s) for g in groups for s in g if s.n_trained]
        limit = find_limit(np.concatenate(moved), self.threshold) if moved else 0.0

        def drop(s: Sample) -> Sample:
            if s.advantage is None or not s.n_trained:
                return s
            kept = s.advantage.astype(np.float64)
            kept[s.loss_mask] *= measure_moved(s) <= limit
            return s.with_advantage(kept)

        return [[drop(s) for s in g] for g in groups]


def measure_moved(sample: Sample) -> Floats:
    """Compute the squared log-ratio of engine and proximal policy at each trained token, [n]."""
    old, now = (c[sample.loss_mask].astype(np.float64) for c in (sample.rollout_logp, sample.columns["prox_logp"]))
    return (old - now) ** 2


def find_limit(moved: Floats, threshold: float) -> float:
    """Return the largest value x such that the mean of all values up to x is below the threshold, or the smallest.

    >>> find_limit(np.array([0.5, 0.1, 0.1, 0.0]), 0.1)
    0.1
    """
    ascending = np.sort(moved)
    means = np.cumsum(ascending) / np.arange(1, len(ascending) + 1)
    is_last = np.append(ascending[1:] > ascending[:-1], True)  # of equal values
    below = np.flatnonzero(is_last & (means < threshold))
    return float(ascending[below[-1]] if len(below) else ascending[0])
