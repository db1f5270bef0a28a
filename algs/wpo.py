"""WPO: preference optimisation with pairs weighted by how likely the policy is to write them
(https://arxiv.org/abs/2406.11827, Eq. 2).

    v(y) = mean_t [log pi(y_t) - log sum_v pi(v)^2]        0 where y is what the policy writes on average
    L    = sg[exp(v(y_w) + v(y_l))] L_DPO

The weight may be above 1. All settings of dpo apply.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algs import dpo
from algs.base import Metrics
from algs.ops import MAX_LOG_RATIO, sequence_mean, sequence_sum
from algs.preference import pair_sum
from core.types.measures import Measure
from core.types.samples import Policy, Tokens


class WPO(dpo.DPO):
    @property
    def measures(self) -> dict[str, Measure]:
        return {"collision": Measure(lambda s, at: (2 * s).exp().sum(-1))}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        likely = sequence_mean((policy.logp - policy.collision.log()).detach(), tokens.seq_ids)
        # each token holds the mean of its completion, so a share of it adds up to the two means of the pair
        share = likely / sequence_sum(torch.ones_like(likely), tokens.seq_ids)
        is_chosen = tokens.advantage > 0
        both = pair_sum(share * is_chosen, tokens) + pair_sum(share * ~is_chosen, tokens)
        weight = both.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return weight * loss, metrics | {"pair/weight": weight}
