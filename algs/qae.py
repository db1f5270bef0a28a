"""QAE: a quantile of the group's rewards as the baseline (https://arxiv.org/abs/2509.22611).

    b   = the smallest reward that at least a share K of the group does not exceed
    A_i = (R_i - b) / std_j R_j                       0 if all R are equal
    L_t = max(-r_t A, -clip(r_t, 1 - low, 1 + high) A),     r_t = pi(a_t) / pi_prox(a_t)

With rewards 0 and 1: if at most 1 - K of the group is right, b is 0 and only the right ones teach; else b is 1 and only
the wrong ones do. The mean would push many samples down for a single right one, and the entropy up.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field
from torch import Tensor

from algs.base import Metrics, PolicyGradient
from algs.credit import reward_std, with_advantages
from algs.ops import clip_metrics, clipped_surrogate, importance_ratio
from core.types.samples import Group, Policy, Tokens


class QAE(PolicyGradient):
    quantile: float = Field(0.4, gt=0, lt=1)
    """K."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)

    @property
    def needs_siblings(self) -> bool:
        return True

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return with_advantages(groups, [a for group in groups for a in self.compare(group)])

    def compare(self, group: Group) -> list[float]:
        """Return the advantage of each sample of a group; 0 for a failed one."""
        rewards = [self.penalised_reward(s) for s in group]
        scored = [r for r in rewards if r is not None]
        if len({*scored}) < 2:
            return [0.0] * len(group)
        baseline = float(np.quantile(scored, self.quantile, method="inverted_cdf"))
        return [0.0 if r is None else (r - baseline) / reward_std(rewards) for r in rewards]

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        loss = clipped_surrogate(ratio, tokens.advantage, self.clip_low, self.clip_high)
        return loss, clip_metrics(ratio, tokens.advantage, self.clip_low, self.clip_high)
