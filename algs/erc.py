"""ERC: entropy ratio clipping on top of PPO's clip (https://arxiv.org/abs/2512.05591).

    rho_t = H(pi) / H(pi_prox)                 entropies of the whole distribution at token t
    L_t   = GRPO's loss, 0 where rho_t is outside of [1 - beta_low, 1 + beta_high]

PPO's clip looks at the sampled token alone. The ratio of entropies also sees what happens to all other tokens.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from algs.base import Metrics
from algs.grpo import GRPO
from core.types.measures import Measure, entropy_of
from core.types.samples import Policy, ScoredColumn, Tokens


class ERC(GRPO):
    beta_low: float = Field(0.05, gt=0, lt=1)
    beta_high: float = Field(0.05, gt=0)

    @property
    def measures(self) -> dict[str, Measure]:
        return super().measures | {"spread": Measure(entropy_of), "spread_before": Measure(entropy_of)}

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return super().required_columns | {"prox.spread_before"}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        now, before = policy.spread.detach(), tokens.column("prox.spread_before")
        # not as a quotient: an entropy may be 0
        outside = (now < (1 - self.beta_low) * before) | (now > (1 + self.beta_high) * before)
        return loss.masked_fill(outside, 0.0), metrics | {"masked": outside.to(loss.dtype)}
