"""INTELLECT policy optimisation, the reinforcement learning loss of prime-rl (release notes of August 2026).

    u_t = pi(a_t) / pi_rollout(a_t), live and unbounded
    L_t = -keep_t u_t A + kl_tau (log u_t)^2            keep_t = 1 where |pi(a_t) - pi_rollout(a_t)| <= delta

A token whose probability moved by more than delta has no policy gradient, whichever way A points; it stays in the mean.
A rare token (pi < delta) is never masked. This is not IPO for preferences, which is dpo with form: ipo.

Others: prime-rl's defaults were delta 0.1 and kl_tau 0.001 until September 2026, and 0.3 and 0 since. DPPO masks only
on the side to which A points (here: dppo).
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import importance_ratio
from algs.terms import Correction
from core.types.samples import Policy, Tokens


class IPORL(GroupRelative):
    correction: Correction = Correction(level="none")
    delta: float = Field(0.3, gt=0)
    kl_tau: float = Field(0.0, ge=0)
    """Weight of the squared log-ratio of every token, masked ones included."""

    @property
    def anchored_on_rollout(self) -> bool:
        return True

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        moved = (policy.logp.detach().exp() - tokens.rollout_logp.exp()).abs()
        masked = moved > self.delta
        gain = importance_ratio(policy.logp, tokens.rollout_logp) * tokens.advantage
        pull = self.kl_tau * (policy.logp - tokens.rollout_logp).square()
        return pull - gain.masked_fill(masked, 0.0), {"masked": masked.to(moved.dtype)}
