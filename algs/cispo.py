"""CISPO: REINFORCE with a clipped importance weight (MiniMax-M1, https://arxiv.org/abs/2506.13585, Eq. 4-5).

    L_t = -sg[min(r_t, max_weight)] A log pi(a_t)           r_t = pi(a_t) / pi_anchor(a_t)

No token is ever dropped: PPO's clip removes the gradient, this one only bounds it. The value of the loss is no
measure; watch the reward. ScaleRL (https://arxiv.org/abs/2510.13786): loss_norm: prompt, scale_rewards: batch.

anchor: prox, the trainer's policy when the step began (MiniMax), or rollout, the engine's; then no correction.

Others: max_weight is the cap itself, as in TRL; slime, verl, open-instruct and SkyRL write it as 1 + epsilon.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import importance_ratio
from core.types.samples import Policy, Tokens


class CISPO(GroupRelative):
    max_weight: float = Field(5.0, gt=0)
    min_weight: float = Field(0.0, ge=0)
    anchor: Literal["prox", "rollout"] = "prox"

    @property
    def anchored_on_rollout(self) -> bool:
        return self.anchor == "rollout"

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        old = tokens.prox_logp if self.anchor == "prox" else tokens.rollout_logp
        ratio = importance_ratio(policy.logp.detach(), old)
        # detached above: a capped token keeps its gradient, with a smaller weight
        weight = ratio.clamp(self.min_weight, self.max_weight)
        return -weight * tokens.advantage * policy.logp, {"capped": (ratio > self.max_weight).to(ratio.dtype)}
