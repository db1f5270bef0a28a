"""SAPO: a soft gate in place of the clip (https://arxiv.org/abs/2511.20347).

    L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A            tau = tau_pos where A > 0, tau_neg elsewhere

At r = 1 the slope is that of the plain ratio; further away it decreases smoothly, faster where A < 0.

Others: AReaL averages by token.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import importance_ratio
from core.types.samples import LossNorm, Policy, Tokens


class SAPO(GroupRelative):
    loss_norm: LossNorm = "sequence"
    tau_pos: float = Field(1.0, gt=0)
    tau_neg: float = Field(1.05, gt=0)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        tau = torch.full_like(ratio, self.tau_neg).masked_fill(tokens.advantage > 0, self.tau_pos)
        gate = torch.sigmoid(tau * (ratio - 1))
        # The sigmoid's slope is tau / 4 at ratio 1, so the factor 4 / tau makes the gradient there the plain ratio's.
        return -4 / tau * gate * tokens.advantage, {"gate": 4 * (gate * (1 - gate)).detach()}
