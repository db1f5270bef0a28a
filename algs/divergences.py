"""Divergences of two distributions at each token: pure functions of log-probabilities, [m, A] in and [m] out.

    p = exp(s): the student, with gradient      q = exp(t): the teacher

A measure calls them (core/types/measures.py), so that [m, A] is a chunk of the head.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from core.strict_model import StrictModel

LEAST_MASS = 1e-12
"""Least probability of the rest of a vocabulary: rounded probabilities may add up to more than 1."""


def kl_divergence(s: Tensor, t: Tensor) -> Tensor:
    """Compute KL(p || q) = sum p (s - t), [m, A] -> [m]."""
    return (s.exp() * (s - t)).sum(-1)


def jensen_shannon(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence, [m, A] -> [m]  (https://arxiv.org/abs/2306.13649, Eq. 1).

    beta KL(q || M) + (1 - beta) KL(p || M) with M = beta q + (1 - beta) p. It vanishes as beta goes to 0 or 1, so these
    two stand for the limits of it divided by beta (1 - beta): KL(q || p) and KL(p || q).
    """
    if beta == 0:
        return kl_divergence(t, s)
    if beta == 1:
        return kl_divergence(s, t)
    mix = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    return beta * kl_divergence(t, mix) + (1 - beta) * kl_divergence(s, mix)


Rest = Literal["drop", "renormalise", "tail"]
"""What becomes of the tokens outside the support K. drop: nothing, so the sum may be negative. renormalise: both
distributions given K. tail: one more outcome, none of K, so it is a KL, and 0 only where both agree on K."""


def log_rest(s: Tensor) -> Tensor:
    """Compute the log of the probability outside K, log(1 - sum_K p), [m, K] -> [m, 1]; dead slots have -inf."""
    return torch.log((1 - s.exp().sum(-1, keepdim=True)).clamp(min=LEAST_MASS))


def kl_on_support(p: Tensor, q: Tensor, rest: Rest, *, live: Tensor | None = None) -> Tensor:
    """Compute KL(p || q) from the log-probabilities of both on K tokens, [m, K] each -> [m].

    live: [m, K] bool, slots that hold a token; None: all.
    """
    if live is not None:
        # finite numbers in the product, and a probability of 0 in the sums
        p, q = (x.masked_fill(~live, -torch.inf) for x in (p, q))
    if rest == "tail":
        p, q = (torch.cat([x, log_rest(x)], -1) for x in (p, q))
    if rest == "renormalise":
        p, q = (x - x.logsumexp(-1, keepdim=True) for x in (p, q))
    gap = p - q
    if live is not None:
        dead = ~live if rest != "tail" else torch.cat([~live, torch.zeros_like(live[:, :1])], -1)
        p, gap = p.masked_fill(dead, 0.0), gap.masked_fill(dead, 0.0)
    return (p.exp() * gap).sum(-1)


class Divergence(StrictModel):
    """Distance of the student's distribution from a teacher's, at each token."""

    beta: float = Field(default=0.5, ge=0, le=1)
    """Jensen-Shannon between KL(teacher || student) (0) and KL(student || teacher) (1)."""
    topk: int | None = Field(default=None, gt=0)
    """Compare the likeliest k tokens only, for beta 0 or 1; unset: the whole vocabulary."""
    support: Literal["teacher", "student"] = "teacher"
    """Whose likeliest k tokens."""
    rest: Rest = "tail"
    """What becomes of the other tokens: one outcome more (tail), left out of both distributions (renormalise), or
    dropped from the sum (drop), whose minimum is not the teacher."""

    @model_validator(mode="after")
    def has_a_support_for_both(self) -> Divergence:
        if self.topk is not None and 0 < self.beta < 1:
            raise ValueError(
                f"topk compares one distribution with another, and beta={self.beta:g} mixes both: set beta to 0 or 1"
            )
        if self.topk is None and (self.support, self.rest) != ("teacher", "tail"):
            raise ValueError("support and rest say which tokens topk leaves out: set topk")
        return self

    def compute(self, s: Tensor, t: Tensor) -> Tensor:
        """Compute it from the log-probabilities of student and teacher, [m, A] each -> [m]."""
        if self.topk is None:
            return jensen_shannon(s, t, self.beta)
        # a choice has no gradient
        chosen = (t if self.support == "teacher" else s).topk(min(self.topk, s.shape[-1])).indices
        p, q = s.gather(-1, chosen), t.gather(-1, chosen)
        return kl_on_support(q, p, self.rest) if self.beta == 0 else kl_on_support(p, q, self.rest)
