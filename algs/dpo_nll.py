"""DPO with the negative log-likelihood of the chosen completions, as one mean over their tokens (RPO, CPO).

    L = L_DPO(pairs) + nll_mean over the chosen tokens of the update of -log pi(y_w,t)

Related losses are settings:
    CPO   reference_free: true, beta: 0.1      https://arxiv.org/abs/2401.08417, Eq. 3-5

The pairs and the tokens have denominators of their own. nll_coef is another likelihood, the mean over each completion
(Iterative RPO), inside of the pair's loss.

Others: TRL's loss_type [sigmoid, sft] takes the mean over the chosen tokens of a micro-batch; the NLL of its CPO covers
prompt tokens too.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from algs.base import Metrics, Term
from algs.dpo import DPO
from algs.preference import preference_sign
from core.types.arrays import Mask
from core.types.samples import Policy, Sample, Tokens


class DPOWithNLL(DPO):
    nll_mean: float = Field(1.0, gt=0)
    """Coefficient of the negative log-likelihood."""

    @property
    def terms(self) -> tuple[Term, ...]:
        return (
            Term("pair", self.loss),
            Term("nll", self.imitate, on=find_chosen, norm="token", coef=self.nll_mean),
        )

    def imitate(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -policy.logp, {}


def find_chosen(sample: Sample) -> Mask:
    """Return the trained tokens of a chosen completion, [L]; none of a rejected one."""
    return sample.loss_mask & (preference_sign(sample) > 0)
