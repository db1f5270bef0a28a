"""CHORD: reinforcement learning and imitation of demonstrations in one update (https://arxiv.org/abs/2508.11408).

    L = (1 - mu) L_GRPO(sampled tokens) + mu mean over demonstrated tokens of -phi_t log pi(y_t)
    phi_t = p (1 - p), p = pi(y_t), detached: tokens that are known or hopeless count less        (CHORD-phi)
    phi_t = 1                                                                                     (CHORD-mu)

Each mean has a denominator of its own. The demonstration is scored, and counts in no baseline. CHORD-mu lets mu fall
over the run: a schedule of alg.mu.

Others: Trinity-RFT weights the masked mean of each micro-batch by the share of sequences, we divide by the tokens of
the update.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from algs.base import Metrics, Term
from algs.grpo import GRPO
from core.types.samples import Policy, Tokens


class CHORD(GRPO):
    mu: float = Field(0.1, ge=0, le=1)
    """Share of imitation in the objective."""
    phi: bool = True
    """Weight each demonstrated token by p (1 - p)."""

    @property
    def terms(self) -> tuple[Term, ...]:
        return (
            Term("rl", self.loss, coef=1 - self.mu),
            Term("imitation", self.imitate, on="demonstrated", norm="token", coef=self.mu),
        )

    def imitate(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        p = policy.logp.detach().exp()
        weight = p * (1 - p) if self.phi else 1.0
        return -weight * policy.logp, {"p": p}
