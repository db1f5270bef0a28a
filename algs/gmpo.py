"""GMPO: the geometric mean of clipped token ratios (https://arxiv.org/abs/2507.20673).

    d_t = log pi(a_t) - log pi_prox(a_t), clipped on the side A pushes to: at +eps where A > 0, at -eps where A < 0
    L_b = -A_b exp(mean_t d_t)                                        shared by the tokens of the sequence

The clip is in log space and wide (0.4), because the mean over tokens dampens the effect of a single token.

Others: verl averages over the micro-batch at hand, so the result depends on how a step is split; ours does not.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from algs.base import GroupRelative, Metrics
from algs.ops import MAX_LOG_RATIO, sequence_mean
from core.types.samples import LossNorm, Policy, Tokens


class GMPO(GroupRelative):
    loss_norm: LossNorm = "sequence"
    clip: float = Field(0.4, gt=0)
    """Bound of a token's log-ratio, eps above."""

    @property
    def whole_episodes(self) -> bool:
        return True

    @property
    def shares_advantage(self) -> bool:
        return True

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        d = (policy.logp - tokens.prox_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # one-sided, as the minimum in PPO's clip: a token that moved against its advantage may come back
        bounded = torch.where(tokens.advantage > 0, d.clamp(max=self.clip), d.clamp(min=-self.clip))
        # the mean of logs is the log of the geometric mean
        ratio = sequence_mean(bounded, tokens.seq_ids).exp()
        # nothing is clipped where A is 0, as with a token's clip
        clipped = (bounded != d) & (tokens.advantage != 0)
        return -ratio * tokens.advantage, {"clip_frac": clipped.to(d.dtype)}
