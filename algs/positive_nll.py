"""GRPO with a negative log-likelihood on the good samples (VAPO, https://arxiv.org/abs/2504.05118, Section 4.3).

    L = L_GRPO + mu mean over the tokens of samples with R >= threshold of -log pi(a_t)

Others: NeMo-RL (positive_example_nll_weight) divides by the count of the micro-batch, we by that of the update.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field
from torch import Tensor

from algs.base import Metrics, Term
from algs.grpo import GRPO
from core.types.arrays import Mask
from core.types.samples import Policy, Sample, Tokens


class PositiveNLL(GRPO):
    mu: float = Field(0.1, ge=0)
    """Coefficient of the negative log-likelihood."""
    threshold: float = 1.0
    """Least reward of a good sample."""

    @property
    def terms(self) -> tuple[Term, ...]:
        return (
            Term("rl", self.loss),
            Term("positives", self.imitate, on=self.find_positives, norm="token", coef=self.mu),
        )

    def find_positives(self, sample: Sample) -> Mask:
        is_good = sample.reward is not None and sample.reward >= self.threshold and sample.origin == "policy"
        return sample.loss_mask if is_good else np.zeros_like(sample.action_mask)

    def imitate(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -policy.logp, {}
