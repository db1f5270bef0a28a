"""KL-Cov: a penalty on the tokens that would cost the most entropy (https://arxiv.org/abs/2505.22617, Eq. 10, 12).

    c_t = (A_t - mean A) (log pi(a_t) - mean log pi)                    means over the tokens of the update
    L_t = -r_t A                                                        r_t = pi(a_t) / pi_prox(a_t)
          + coef |log pi(a_t) - log pi_prox(a_t)|   for the `fraction` of the update's tokens with the largest c_t

Entropy falls with the covariance of advantage and log-probability, most of which is in few tokens. There is no clip. On
the first update of a step pi is pi_prox, and the penalty has no gradient.

Others: the paper writes a KL; its code, verl and SkyRL take |log r|. The latter two rank the tokens of a micro-batch.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import importance_ratio
from algs.reductions import Stages, count, exact_sum, kth
from core.types.samples import Policy, Tokens


class KLCov(GroupRelative):
    fraction: float = Field(2e-3, ge=0, le=1)
    """Part of the tokens with a penalty; at least one token."""
    coef: float = Field(1.0, ge=0)
    """Weight of the penalty."""

    @property
    def not_outwards(self) -> str:
        return "the penalty on chosen tokens holds them at ratio 1"

    def totals(self, policy: Policy, tokens: Tokens) -> Stages:
        lp, advantage = policy.logp, tokens.advantage
        t = yield {"n": count(lp), "advantage": exact_sum(advantage), "logp": exact_sum(lp)}
        yield {"cov": kth(covariance(lp, advantage, t), fraction=self.fraction)}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        chosen = tokens.first["cov"] >= tokens.totals["cov"]
        penalty = torch.where(chosen, (policy.logp - tokens.prox_logp).abs(), 0.0)
        return -ratio * tokens.advantage + self.coef * penalty, {"penalised": chosen.to(ratio.dtype)}


def covariance(lp: Tensor, advantage: Tensor, t: dict[str, Tensor]) -> Tensor:
    """Compute each token's part of the covariance of advantage and log-probability, [M]; t: the update's sums."""
    return (advantage - t["advantage"] / t["n"]) * (lp - t["logp"] / t["n"])
