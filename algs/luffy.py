"""LUFFY: demonstrations in the group, with a shaped probability in place of the ratio
(https://arxiv.org/abs/2504.14945, Eq. 7-9).

    A_i = R_i - mean_j R_j                      over the whole group, demonstrations included
    L_t = -pi(a_t) / pi_prox(a_t) A             at sampled tokens, not clipped
    L_t = -pi(y_t) / (pi(y_t) + gamma) A        at demonstrated tokens, live: a rare token moves most

Both share one mean. loss_norm: constant is the released script's, token the paper's.

Others: the released script divides by the padded width, and by the group's standard deviation (scale_rewards: group).
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics, Term
from algs.ops import importance_ratio
from core.types.arrays import Mask
from core.types.samples import Origin, Policy, Sample, Tokens


class LUFFY(GroupRelative):
    gamma: float = Field(0.1, gt=0)
    """Probability at which a demonstrated token's weight is a half."""

    @property
    def baseline_origins(self) -> frozenset[Origin]:
        return frozenset({"policy", "other", "demonstration"})

    @property
    def terms(self) -> tuple[Term, ...]:
        def find_chosen(sample: Sample) -> Mask:
            return sample.loss_mask

        return (
            Term("on_policy", self.loss, among=find_chosen),
            Term("off_policy", self.shaped, on="demonstrated", among=find_chosen),
        )

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -importance_ratio(policy.logp, tokens.prox_logp) * tokens.advantage, {}

    def shaped(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        p = policy.logp.exp()
        return -p / (p + self.gamma) * tokens.advantage, {"p": p}
