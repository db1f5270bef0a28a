"""Tilted PPO, which stresses the tokens of the largest loss, as SkyRL's DRO (https://github.com/NovaSky-AI/SkyRL/pull/1259).

    l_t = PPO's clipped loss
    L   = log(mean_t exp(beta l_t)) / beta                              mean over the tokens of the update

The tokens' mean for beta to 0, their maximum for beta to infinity: a distributionally robust objective. The gradient is
that of q_t l_t with q_t = exp(beta l_t) / mean exp(beta l), held back from the gradient; the value of every token is L.

Others: three unrelated losses are called DRO, see dro.py. The pull request does not say which tokens the mean is of.
"""

from __future__ import annotations

from pydantic import Field, field_validator
from torch import Tensor

from algs.base import Metrics, with_prox
from algs.grpo import GRPO
from algs.preference import require_norm
from algs.reductions import Stages, count, exact_sum, largest
from core.types.samples import LossNorm, Policy, Tokens


class Tilted(GRPO):
    beta: float = Field(0.1, gt=0)
    """Strength of the tilt."""

    @field_validator("loss_norm")
    @classmethod
    def weighs_tokens(cls, given: LossNorm) -> LossNorm:
        return require_norm("token", given)

    @property
    def not_on_policy(self) -> str:
        return "tokens with a larger loss count more"

    def totals(self, policy: Policy, tokens: Tokens) -> Stages:
        loss, _ = super().loss(policy, with_prox(policy, tokens))
        t = yield {"n": count(loss), "worst": largest(loss)}
        # below the largest, so that no exponential overflows
        yield {"tilt": exact_sum((self.beta * (loss - t["worst"])).exp())}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        t, held = tokens.totals, loss.detach()
        mean = t["tilt"] / t["n"]
        weight = (self.beta * (held - t["worst"])).exp() / mean
        value = t["worst"] + mean.log() / self.beta
        return value + weight * (loss - held), metrics | {"tilt": weight}
