"""GPG: group policy gradient, REINFORCE with the group's mean as the baseline (https://arxiv.org/abs/2504.02546).

    A_i = alpha (R_i - mean_j R_j)          alpha = B / (B - M)
    L_t = -A log pi(a_t)                    no ratio, no clip, no KL, no division by a standard deviation

B counts the step's samples and M those of groups without signal, whose gradient is 0: alpha makes up for them.

Others: verl counts samples whose score is 0 for M (counts: nonzero), so alpha grows where the policy fails.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from algs.base import GroupRelative, Metrics
from core.types.samples import Group, Policy, Tokens


class GPG(GroupRelative):
    counts: Literal["signal", "nonzero"] = "signal"
    """B - M: samples in groups with a signal, or with a reward that is not 0 (verl)."""

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        groups = super().compute_advantages(groups)
        scored = [sum(s.reward is not None for s in g) for g in groups]
        taught = [any(s.advantage is not None and s.advantage.any() for s in g) for g in groups]
        teaching = sum(n for n, any_signal in zip(scored, taught, strict=True) if any_signal)
        if self.counts == "nonzero":
            teaching = max(1, sum(bool(s.reward) for g in groups for s in g))
        alpha = sum(scored) / teaching if teaching else 1.0
        return [[s.replace(advantage=s.advantage * alpha) if s.advantage is not None else s for s in g] for g in groups]

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantage * policy.logp, {}
