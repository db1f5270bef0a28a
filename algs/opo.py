"""OPO: on-policy REINFORCE with the baseline of least variance (https://arxiv.org/abs/2505.23585).

    b   = sum_j n_j R_j / sum_j n_j                    n: trained tokens of a completion of the group
    L_t = -(R - b) log pi(a_t)                         no ratio, no clip, no KL, no standard deviation

A long completion has a larger gradient, so its reward counts more in the baseline.
"""

from __future__ import annotations

import math

from torch import Tensor

from algs.base import Metrics
from algs.compared import ComparesGroup
from core.types.samples import Group, Policy, Tokens


class OPO(ComparesGroup):
    def compare(self, group: Group, rewards: list[float | None]) -> list[float]:
        """Return the advantage of each sample of a group; 0 without a reward, and if all rewards are equal.

        Samples without trained tokens have no part in the baseline.
        """
        scored = [(r, s.n_trained) for r, s in zip(rewards, group, strict=True) if r is not None and s.n_trained]
        if len({r for r, _ in scored}) < 2:
            return [0.0] * len(group)
        baseline = math.fsum(r * n for r, n in scored) / sum(n for _, n in scored)
        return [0.0 if r is None else r - baseline for r in rewards]

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantage * policy.logp, {}
