"""RAFT: learning from the best of the policy's own samples (https://arxiv.org/abs/2304.06767).

    keep: positive     every sample whose reward is at least `threshold`     (rejection sampling)
    keep: best         the best sample of each group   (best-of-n distillation)
    clip: null         L_t = -log pi(a_t)                                    RAFT
    clip: 0.2          L_t = PPO's clipped loss with A = 1                   RAFT++, https://arxiv.org/abs/2504.11343

Samples that are not kept are not trained on, and count in no mean.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from algs.base import Metrics, PolicyGradient, with_advantages
from algs.ops import clip_metrics, clipped_surrogate, importance_ratio
from core.types.samples import Group, Policy, Tokens


class RAFT(PolicyGradient):
    keep: Literal["positive", "best"] = "positive"
    threshold: float = 0.5
    """Least reward of a kept sample, for keep: positive."""
    clip: float | None = Field(None, gt=0, lt=1)

    @property
    def not_on_policy(self) -> str:
        return "samples that are not kept are left out of the mean"

    def accept_group(self, group: Group) -> bool:
        return any(self.find_kept(group))

    def find_kept(self, group: Group) -> list[bool]:
        """Tell for each sample of a group whether it is trained on."""
        rewards = [self.penalised_reward(s) for s in group]
        if self.keep == "positive":
            return [r is not None and r >= self.threshold for r in rewards]
        # of equal rewards the one whose tokens come first, so that the order of the group does not matter
        ranked = [
            (-r, s.token_ids.tolist(), n) for n, (r, s) in enumerate(zip(rewards, group, strict=True)) if r is not None
        ]
        best = min(ranked)[2] if ranked else None
        return [n == best for n in range(len(group))]

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        kept = [self.find_kept(g) for g in groups]
        if not any(map(any, kept)):  # an update needs a token; at advantage 0 it teaches nothing
            return with_advantages(groups, [0.0 for g in groups for _ in g])
        chosen = [
            [s if keep else s.replace(excluded=np.ones_like(s.action_mask)) for s, keep in zip(g, own, strict=True)]
            for g, own in zip(groups, kept, strict=True)
        ]
        return with_advantages(chosen, [1.0 for g in groups for _ in g])

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        if self.clip is None:
            return -tokens.advantage * policy.logp, {}
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        loss = clipped_surrogate(ratio, tokens.advantage, self.clip, self.clip)
        return loss, clip_metrics(ratio, tokens.advantage, self.clip, self.clip)
