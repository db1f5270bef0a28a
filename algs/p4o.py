"""P4O: P3O with two anchors, the engine's policy and the trainer's at the start of the step
(https://arxiv.org/abs/2605.12380, Eq. 13 and App. B).

    e_b = ESS(pi / pi_rollout), e_p = ESS(pi / pi_prox), e = min(e_b, e_p)          over the whole update
    pi_mix = ((1 - e_b) pi_rollout + (1 - e_p) pi_prox) / ((1 - e_b) + (1 - e_p))
    L_t = -sg[min(pi / pi_rollout, e)] A log pi(a_t) + (1 - e) k3(pi, pi_mix)

With one update per step pi_prox is the policy itself, e_p = 1, and this is P3O. The paper finds P3O as good or better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algs.base import GroupRelative, Metrics, with_prox
from algs.ops import effective_sample_size, importance_ratio, k3, weight_sums
from algs.reductions import Stage
from algs.terms import Correction
from core.types.samples import Policy, Tokens


class P4O(GroupRelative):
    correction: Correction = Correction(level="none")

    @property
    def anchored_on_rollout(self) -> bool:
        return True

    def totals(self, policy: Policy, tokens: Tokens) -> Stage:
        prox, rollout = with_prox(policy, tokens).prox_logp, tokens.rollout_logp
        of = {"b_": weight_sums(importance_ratio(policy.logp, rollout))}
        of["p_"] = weight_sums(importance_ratio(policy.logp, prox))
        return {prefix + name: value for prefix, sums in of.items() for name, value in sums.items()}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        prox, rollout = tokens.prox_logp, tokens.rollout_logp
        e_b, e_p = (effective_sample_size(tokens.totals, prefix) for prefix in ("b_", "p_"))
        e = torch.minimum(e_b, e_p)
        # 1 - ESS may round to -1e-17. If both are 0 the mixture has weight 0, and must only stay finite.
        share = (1 - e_p).clamp(min=0) / ((1 - e_b).clamp(min=0) + (1 - e_p).clamp(min=0)).clamp(min=1e-12)
        mix = torch.logaddexp(rollout + torch.log1p(-share), prox + share.log())
        weight = torch.minimum(importance_ratio(policy.logp.detach(), rollout), e)
        loss = -weight * tokens.advantage * policy.logp + (1 - e) * k3(policy.logp, mix)
        return loss, {"ess": e.expand_as(weight), "ess_prox": e_p.expand_as(weight)}
