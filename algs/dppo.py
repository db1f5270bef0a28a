"""DPPO: a trust region in probabilities instead of ratios (https://arxiv.org/abs/2602.04879, Sec. 5.2).

    p = pi(a_t), q = pi_rollout(a_t), u = p / q
    L_t = -keep_t sg[min(u, max_weight)] A log p
    keep_t = 0 where A pushes p further away from q and they already differ by more than delta:
        divergence: tv   |p - q|
        divergence: kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))

A ratio clip is strict with rare tokens and loose with frequent ones; this bound treats both alike. The anchor of mask
and weight is the engine's policy, so no correction is applied on top.

Others: verl's dppo_* modes take the trainer's old policy for the engine's; SkyRL keeps the ratio live and unbounded.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import importance_ratio
from algs.terms import Correction
from core.types.samples import LossNorm, Policy, Tokens


class DPPO(GroupRelative):
    loss_norm: LossNorm = "constant"
    correction: Correction = Correction(level="none")
    divergence: Literal["tv", "kl"] = "tv"
    delta_low: float = Field(0.15, gt=0)
    delta_high: float = Field(0.15, gt=0)
    max_weight: float = Field(20.0, gt=0)

    @property
    def anchored_on_rollout(self) -> bool:
        return True

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        logp, advantage = policy.logp.detach(), tokens.advantage
        p, q = logp.exp(), tokens.rollout_logp.exp()
        far = (p - q).abs()
        if self.divergence == "kl":
            # log(1 - p) is -inf at p = 1, which rounding reaches for near-certain tokens.
            rest = torch.log1p(-q.clamp(max=1 - 1e-7)) - torch.log1p(-p.clamp(max=1 - 1e-7))
            far = q * (tokens.rollout_logp - logp) + (1 - q) * rest
        # masked only while the update would move the policy further away
        out_high = (advantage > 0) & (p > q) & (far > self.delta_high)
        out_low = (advantage < 0) & (p < q) & (far > self.delta_low)
        weight = importance_ratio(logp, tokens.rollout_logp).clamp(max=self.max_weight)
        weight = weight.masked_fill(out_high | out_low, 0.0)
        return -weight * advantage * policy.logp, {"masked": (out_high | out_low).to(p.dtype)}
