"""RLOO: REINFORCE with the other completions' mean reward as the baseline (https://arxiv.org/abs/2402.14740).

    A_i = R_i - mean_{j != i} R_j
    L_b = -A_b sum_t log pi(a_t)                no ratio, no clip, no division by length or standard deviation

With KL in the reward (kl: {coef: 0.05, place: reward}), R_i is the reward minus coef x the completion's summed k1.

Others: TRL's RLOOTrainer multiplies by a clipped sequence ratio (here: gspo with ratio: product); verl, OpenRLHF and
SkyRL put these advantages into PPO's token clip (here: grpo with leave_one_out: true).
"""

from __future__ import annotations

from torch import Tensor

from algs.base import GroupRelative, Metrics
from core.types.samples import LossNorm, Policy, Tokens


class RLOO(GroupRelative):
    loss_norm: LossNorm = "sequence_sum"
    leave_one_out: bool = True

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantage * policy.logp, {}
