"""Reward model from preferences: the model of Bradley and Terry (1952; https://arxiv.org/abs/2203.02155, Eq. 1).

The transformer returns one number instead of logits, r(x, y), read at the last token:

    L = -log sigmoid(r(x, y_w) - r(x, y_l) - target_margin) + center (r(x, y_w) + r(x, y_l))^2

Only differences of r have a meaning; `center` pulls r towards zero (https://arxiv.org/abs/2312.09244). The model is
saved as a Hugging Face sequence classifier with one label; `reward.function: reward_model` uses it as the reward of an
RL run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from algs.base import Metrics
from algs.preference import Pairwise, pair_metrics, pair_sum
from core.types.samples import Group, Sample, Tokens


class RewardModel(Pairwise):
    target_margin: float = Field(0.0, ge=0)
    center: float = Field(0.0, ge=0)

    @property
    def model_kind(self) -> Literal["policy", "reward"]:
        return "reward"

    def prepare_groups(self, groups: list[Group]) -> list[Group]:
        return [[append_scored_token(s) for s in g] for g in groups]

    def value_loss(self, values: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Compute the loss, [M] -> [M]; every completion has a single trained token, whose value is the reward."""
        # The advantage is +1 or -1, so the sum over a pair is the difference of the two rewards.
        signed = tokens.advantage * values
        loss = -logsigmoid(pair_sum(signed, tokens) - self.target_margin)
        loss = loss + self.center * pair_sum(values, tokens).square()
        return loss, pair_metrics(signed, tokens)


def append_scored_token(sample: Sample) -> Sample:
    """Append a copy of the last token and train only on the copy: its value is read at the original last token."""
    n = len(sample.token_ids) + 1
    return replace(
        sample,
        # which token is appended does not matter: it is predicted, and never read
        token_ids=np.append(sample.token_ids, sample.token_ids[-1]),
        action_mask=np.arange(1, n + 1) == n,
        rollout_logp=np.zeros(n, dtype=sample.float_dtype),
        versions=np.full(n, -1, dtype=np.int32),
    )
