"""GRPO: group-relative policy optimisation (https://arxiv.org/abs/2402.03300, Eq. 3-4).

Sample G completions of a prompt, compare each reward with the group's mean, and take a clipped policy-gradient step:

    A_i = R_i - mean_j R_j                                  (0 if all R are equal)
    r_t = pi(a_t) / pi_prox(a_t)
    L_t = max(-r_t A, -clip(r_t, 1 - low, 1 + high) A)

Related algorithms are settings:
    as published   scale_rewards: group, loss_norm: sequence, clip_high: 0.2, kl: {coef: 0.04, estimator: k3}
    Dr. GRPO       loss_norm: constant                                        https://arxiv.org/abs/2503.20783
    DAPO           dynamic_sampling: true, overlong: {mode: penalty, ...}     https://arxiv.org/abs/2503.14476
    MaxRL          scale_rewards: mean                                                https://arxiv.org/abs/2602.02710
    decoupled PPO  correction: {high: .inf}, or a cap; updates_per_step > 1   https://arxiv.org/abs/2110.00641

Others: TRL's GRPOTrainer and verl normalise by token, as we do by default, and not as published; verl's Dr. GRPO
divides by the padded width by default, we by rollout.max_new_tokens; verl bounds the loss at ratio 3 where A < 0
(dual_clip: 3). We do not divide by the group's standard deviation by default.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import clip_metrics, clipped_surrogate, importance_ratio
from core.types.samples import Policy, Tokens


class GRPO(GroupRelative):
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    """Bound the loss of a token with A < 0 where its ratio exceeds this (INTELLECT-2's delta, verl's dual clip)."""

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        loss = clipped_surrogate(ratio, tokens.advantage, self.clip_low, self.clip_high, self.dual_clip)
        return loss, clip_metrics(ratio, tokens.advantage, self.clip_low, self.clip_high)
