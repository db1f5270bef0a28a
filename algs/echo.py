"""ECHO: GRPO, and cross-entropy on what the environment answers (https://arxiv.org/abs/2605.24517).

    L = L_GRPO(sampled tokens) + alpha mean over observed tokens of -log pi(o_t | o_<t)

Observed are the tokens of the environment after the first sampled one, such as tool results and the template around
them. The mean has a denominator of its own: a tool that prints more does not shrink the policy's step. Every episode
counts, also one of a group whose rewards are equal.

Others: the paper leaves warnings out of the cross-entropy, and prime-rl the tokens that the chat template adds.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from algs.base import Metrics, Term
from algs.grpo import GRPO
from core.types.samples import Policy, Tokens


class ECHO(GRPO):
    alpha: float = Field(0.1, ge=0)
    """Coefficient of the cross-entropy on observed tokens."""

    @property
    def terms(self) -> tuple[Term, ...]:
        return (
            Term("rl", self.loss),
            Term("observed", self.predict_answer, on="observed", norm="token", coef=self.alpha),
        )

    def predict_answer(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -policy.logp, {}
