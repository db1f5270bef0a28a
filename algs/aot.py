"""AOT: alignment of two distributions by optimal transport (https://arxiv.org/abs/2406.05882, Eq. 8).

    w, l = sum_t [log pi - log pi_ref] of each chosen and each rejected completion of the update, sorted
    L    = mean_i -log sigmoid(beta (w_(i) - l_(i)))                    i-th smallest with i-th smallest

The distribution of chosen completions is to dominate that of the rejected ones; who was compared with whom does not
matter. Each completion's partner is held back from the gradient, and meets its own partner in its own loss: the
gradient is that of L. Equal sums have one partner.

Others: TRL's aot_unpaired sorts within a micro-batch. Its aot, which sorts the pairs' margins, is left out.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from algs.base import Metrics
from algs.preference import Pairwise, pair_metrics, pair_sum
from algs.reductions import Stages, gather
from core.types.samples import Policy, ScoredColumn, Tokens


class AOT(Pairwise):
    beta: float = Field(0.1, gt=0)
    """Strength of the KL constraint to the reference; larger keeps the policy closer."""

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return frozenset({"ref_logp"})

    def sum_pairs(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Compute the two sums of each token's pair, [M] each."""
        gained = policy.logp - tokens.ref_logp
        is_chosen = tokens.advantage > 0
        return pair_sum(gained * is_chosen, tokens), pair_sum(gained * ~is_chosen, tokens)

    def totals(self, policy: Policy, tokens: Tokens) -> Stages:
        chosen, rejected = self.sum_pairs(policy, tokens)
        yield {"chosen": gather(chosen, tokens.group_ids), "rejected": gather(rejected, tokens.group_ids)}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        chosen, rejected = self.sum_pairs(policy, tokens)
        above = logsigmoid(self.beta * (chosen - find_partner(tokens, "chosen", "rejected")))
        below = logsigmoid(self.beta * (find_partner(tokens, "rejected", "chosen") - rejected))
        both = above + below
        # every match is in two losses: half of each for the value, all for the gradient
        return both.detach() / 2 - both, pair_metrics(tokens.advantage * (policy.logp - tokens.ref_logp), tokens)


def find_partner(tokens: Tokens, own: str, other: str) -> Tensor:
    """Return the sum in `other` whose rank is that of the token's own sum, [M]."""
    place = torch.searchsorted(tokens.totals[own], tokens.first[own])
    return tokens.totals[other][place]
