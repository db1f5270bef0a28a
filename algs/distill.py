"""Distillation from stored distributions: a teacher's likeliest tokens, kept with the rows (data_prep/distill.py).

q: the teacher's probabilities of the K tokens that are stored for a position      s: log-probabilities of the student
    tail           L_t = sum_K q (log q - s) + q_r (log q_r - log p_r)      r: all other tokens, one outcome more
    truncated      L_t = sum_K q (log q - s)                                may be negative
    cross_entropy  L_t = -sum_K q / (sum_K q) s                             SFT on soft labels

K may differ from token to token, and rounded probabilities may add up to more than 1. No teacher is loaded.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from algs.base import Algorithm, Metrics
from algs.divergences import kl_on_support
from algs.stored import with_stored
from core.types.measures import At, Measure
from core.types.samples import Group, Policy, Tokens

NAME = "topk"


class Distill(Algorithm):
    form: Literal["tail", "truncated", "cross_entropy"] = "tail"

    @property
    def measures(self) -> dict[str, Measure]:
        return {"distance": Measure(self.compare)}

    def prepare_groups(self, groups: list[Group]) -> list[Group]:
        return [[with_stored(s, NAME) for s in g] for g in groups]

    def compare(self, s: Tensor, at: At) -> Tensor:
        """Compute the distance from the stored distribution, [m, A] -> [m]."""
        stored = at.stored(NAME)
        p, q = s.gather(-1, stored.columns), stored.logp
        if self.form != "cross_entropy":
            return kl_on_support(q, p, "tail" if self.form == "tail" else "drop", live=stored.live)
        weight = q.exp() * stored.live
        return -(weight * p).sum(-1) / weight.sum(-1)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return policy.distance, {}
