"""TOPR: tapered off-policy REINFORCE (https://arxiv.org/abs/2503.14286).

    W   = prod_t pi(a_t) / pi_rollout(a_t)                of the sequence's trained tokens, detached
    L_t = -A log pi(a_t)                  for A >= 0: a good sample is imitated, however unlikely it has become
    L_t = -min(W, 1) A log pi(a_t)        for A < 0: a bad one is pushed away only as far as pi still samples it

A is the reward minus the group's mean. The weight is the behaviour policy's, so there is no correction on top.

Others: ROLL has the two signs as losses of their own, with a coefficient each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import sequence_sum
from algs.terms import Correction
from core.types.samples import LossNorm, Policy, Tokens


class TOPR(GroupRelative):
    loss_norm: LossNorm = "sequence_sum"
    correction: Correction = Correction(level="none")

    @property
    def anchored_on_rollout(self) -> bool:
        return True

    @property
    def whole_episodes(self) -> bool:
        return True

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        drift = sequence_sum(policy.logp.detach() - tokens.rollout_logp, tokens.seq_ids)
        weight = torch.where(tokens.advantage < 0, drift.clamp(max=0).exp(), 1.0)
        return -weight * tokens.advantage * policy.logp, {"sequence_weight": weight}
