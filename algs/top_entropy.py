"""80/20: GRPO on the tokens of high entropy (https://arxiv.org/abs/2506.01939, Eq. 5-6).

    L_t = PPO's clipped loss where H_t >= the `quantile` of the update's entropies, otherwise 0

The few tokens where the policy decides between ways to go on carry the gain. All tokens count in the mean, so the step
shrinks by about 1 - quantile; raise the learning rate instead of the weight.

Others: TRL's top_entropy_quantile is 1 - quantile, and the threshold is that of a micro-batch over all ranks.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from algs.base import Metrics
from algs.grpo import GRPO
from algs.reductions import Stages, quantile
from core.types.samples import Policy, Tokens


class TopEntropy(GRPO):
    quantile: float = Field(0.8, ge=0, lt=1)
    """Part of the tokens without a gradient, those of the lowest entropy."""

    @property
    def needs_entropy(self) -> bool:
        return True

    @property
    def not_on_policy(self) -> str:
        return "tokens of low entropy have no gradient"

    def totals(self, policy: Policy, tokens: Tokens) -> Stages:
        assert policy.entropy is not None
        yield {"entropy": quantile(policy.entropy, self.quantile)}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        is_high = tokens.first["entropy"] >= tokens.totals["entropy"]
        return loss.masked_fill(~is_high, 0.0), metrics | {"high_entropy": is_high.to(loss.dtype)}
