"""IW-OPD: on-policy distillation that stresses the first disagreements with the teacher (https://arxiv.org/abs/2606.22600).

    a_t = log pi_teacher(a_t) - log pi_rollout(a_t)
    w_t = 1 + gamma (1 - sum_{s<t} |a_s| / sum_s |a_s|)         over the trained tokens of the sequence
    L_t = -w_t a_t log pi(a_t)

After a token on which student and teacher differ, the teacher grades a text that it would not have written.

Others: TRL is the same. It has no ratio, so it is for samples of the current policy; opd.py corrects stale ones.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field
from torch import Tensor

from algs.base import Metrics
from algs.opd import OPD
from core.types.samples import Group, Policy, Sample, Tokens


class IWOPD(OPD):
    gamma: float = Field(1.0, ge=0)
    """Additional weight of a sequence's first token."""

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return [[self.stress(s) for s in g] for g in super().compute_advantages(groups)]

    def stress(self, sample: Sample) -> Sample:
        assert sample.advantage is not None
        graded = sample.advantage.astype(np.float64)
        own = graded[sample.loss_mask]
        before = np.cumsum(np.abs(own)) - np.abs(own)
        graded[sample.loss_mask] = own * (1 + self.gamma * (1 - before / max(np.abs(own).sum(), 1e-8)))
        return sample.with_advantage(graded)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantage * policy.logp, {}
