"""GRPO: group-relative policy optimisation (https://arxiv.org/abs/2402.03300, Eq. 3-4).

Sample G answers to a prompt, call an answer good in so far as it beats its siblings, and take a
clipped policy-gradient step:

    A_i = R_i - mean_j R_j                                  (0 if all R are equal)
    r_t = pi(a_t) / pi_prox(a_t)
    L_t = max(-r_t A, -clip(r_t, 1 - low, 1 + high) A)

Its relatives are settings:
    as published  std: group, loss_norm: sequence, clip_high: 0.2, kl: {coef: 0.04, estimator: k3}
    Dr. GRPO      loss_norm: constant                                        https://arxiv.org/abs/2503.20783
    DAPO          drop_dead_groups: true (clip_high is 0.28 by default)      https://arxiv.org/abs/2503.14476
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import clip_metrics, clipped_surrogate, importance_ratio
from core.types import Policy, Tokens


class GRPO(GroupRelative):
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        assert tokens.advantage is not None and tokens.prox_logp is not None
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        loss = clipped_surrogate(ratio, tokens.advantage, self.clip_low, self.clip_high)
        return loss, clip_metrics(ratio, tokens.advantage, self.clip_low, self.clip_high)
