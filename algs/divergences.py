"""Divergences of two distributions at each token: pure functions of log-probabilities, [m, A] in and [m] out.

    p = exp(s): the student, with gradient      q = exp(t): the teacher

A measure calls them (core/types/measures.py), so that [m, A] is a chunk of the head.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

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
