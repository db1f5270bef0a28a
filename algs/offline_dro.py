"""Offline DRO: regression of rewards on log-ratios, on replies of any policy (https://arxiv.org/abs/2405.19107, Eq. 6).

For replies y_1 ... y_K to a prompt x, with rewards r_i:

    S_i = sum_t [log pi - log pi_ref](y_i,t)
    V   = mean_j (r_j - beta S_j)                                   the best V for these replies
    L   = mean_i 1/2 (r_i - V - beta S_i)^2

The minimum is pi_ref exp(r / beta) / Z on the replies, whoever sampled them: no importance weight is needed, so no
log-probabilities are. One reply of a prompt says nothing. beta sets how far the policy goes from the reference.

Others: the paper trains a second model for V on single replies; with several replies of a prompt their mean is the
minimiser, and the gradient through it is 0 (OPMD, Trinity-RFT; Kimi k1.5, https://arxiv.org/abs/2501.12599, Eq. 3).
"""

from __future__ import annotations

import torch
from pydantic import Field, field_validator
from torch import Tensor

from algs.base import Algorithm, Metrics
from algs.ops import sequence_sum
from algs.preference import require_norm, with_advantage_of
from core.types.samples import Group, LossNorm, Policy, Rows, ScoredColumn, Tokens


class OfflineDRO(Algorithm):
    loss_norm: LossNorm = "sequence"
    """sequence: every token of a reply has the reply's loss, and the tokens share its weight."""
    beta: float = Field(0.1, gt=0)
    """Reward that a log-ratio of one is worth; larger keeps the policy closer to the reference."""

    @field_validator("loss_norm")
    @classmethod
    def weighs_replies(cls, given: LossNorm) -> LossNorm:
        return require_norm("sequence", given)

    @property
    def rows(self) -> Rows:
        return "scored"

    @property
    def whole_groups(self) -> bool:
        return True

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return frozenset({"ref_logp"})

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return with_advantage_of(groups, lambda s: s.reward or 0.0)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        gain = sequence_sum(policy.logp - tokens.ref_logp, tokens.seq_ids)  # [M]
        error = tokens.advantage - self.beta * gain
        error = error - row_mean(error, tokens)
        gained, reward = (x - row_mean(x, tokens) for x in (gain.detach(), tokens.advantage))
        return error.square() / 2, {"offline_dro/accuracy": (gained * reward > 0).to(gain.dtype)}


def row_mean(of_reply: Tensor, tokens: Tokens) -> Tensor:
    """Compute the mean over the replies of each token's row, [M] -> [M], detached."""
    first = torch.ones_like(tokens.seq_ids, dtype=torch.bool)
    first[1:] = tokens.seq_ids[1:] != tokens.seq_ids[:-1]
    # zeros in place of the other tokens: to choose the first would wait for the device to count them
    values, rows = of_reply.detach().where(first, 0.0), tokens.group_ids
    # in the order of the values: the sum must not depend on the order of the replies
    order = values.argsort()
    sums = torch.zeros_like(of_reply).index_add(0, rows[order], values[order])
    replies = torch.zeros_like(of_reply).index_add(0, rows, first.to(values.dtype))
    return sums[tokens.group_ids] / replies[tokens.group_ids]
