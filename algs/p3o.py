"""P3O: the effective sample size of the batch sets cap and KL (https://arxiv.org/abs/2605.12380, Eq. 7, 11, 12).

    u_t = pi(a_t) / pi_rollout(a_t)
    e = (sum u)^2 / (n sum u^2)                               effective sample size, over the whole update
    L_t = -sg[min(u_t, e)] A log pi(a_t) + (1 - e) k3(pi, pi_rollout)

On fresh samples e = 1 and this is REINFORCE. With stale samples, weights are capped lower and the policy stays closer
to pi_rollout. There is nothing to tune. e is summed in a separate forward pass before the update, so it does not depend
on micro-batches or ranks. k3's gradient on samples of pi_rollout is not that of KL(pi || pi_rollout), but it also
vanishes only if the two policies are equal.

Others: upstream FeynRL takes e from each micro-batch; the paper has the exact KL over the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import effective_sample_size, importance_ratio, k3, weight_sums
from algs.reductions import Stage
from algs.terms import Correction
from core.types.samples import Policy, Tokens


class P3O(GroupRelative):
    correction: Correction = Correction(level="none")

    @property
    def anchored_on_rollout(self) -> bool:
        return True

    def totals(self, policy: Policy, tokens: Tokens) -> Stage:
        return weight_sums(importance_ratio(policy.logp, tokens.rollout_logp))

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        e = effective_sample_size(tokens.totals)
        weight = torch.minimum(importance_ratio(policy.logp.detach(), tokens.rollout_logp), e)
        loss = -weight * tokens.advantage * policy.logp + (1 - e) * k3(policy.logp, tokens.rollout_logp)
        return loss, {"ess": e.expand_as(weight)}
