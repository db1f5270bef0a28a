"""Pass@k training: the worth of a sample in a group of k of its siblings (https://arxiv.org/abs/2508.10751, Eq. 10-15).

Of a group of N samples of which F fail, a group of k passes if one sample does:

    mean = 1 - C(F, k) / C(N, k)        std = sqrt(mean (1 - mean))
    A    = (1 - mean) / std                                          of a sample that passes
    A    = (1 - mean - C(F - 1, k - 1) / C(N - 1, k - 1)) / std      of one that fails
    L_t  = PPO's clipped loss

This is the exact mean, over all groups of k that hold the sample, of the group's normalised reward. Failures cost
little while one of k samples passes, so the policy keeps several ways of answering.

form: best is another method, verl's GRPO_PASSK (https://arxiv.org/abs/2503.19595), without k and threshold:

    A    = (R - second best R) / (std + 1e-6)                        of the only best sample, 0 of the others
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor

from algs.base import Metrics
from algs.compared import ComparesGroup
from algs.credit import reward_std
from algs.ops import clip_metrics, clipped_surrogate, importance_ratio
from core.types.samples import Group, Policy, Tokens


class PassK(ComparesGroup):
    form: Literal["groups", "best"] = "groups"
    k: int = Field(2, ge=2)
    threshold: float = 0.5
    """Least reward of a sample that passes."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)

    def compare(self, group: Group, rewards: list[float | None]) -> list[float]:
        """Return the advantage of each sample of a group; 0 without a reward, and if all groups of k are equal."""
        if self.form == "best":
            return credit_best(rewards)
        passed = [r >= self.threshold for r in rewards if r is not None]
        n, failed, k = len(passed), passed.count(False), self.k
        if n < k or not 0 < math.comb(failed, k) < math.comb(n, k):
            return [0.0] * len(group)
        mean = 1 - math.comb(failed, k) / math.comb(n, k)
        std = math.sqrt(mean * (1 - mean))
        up, down = 1 - mean, 1 - mean - math.comb(failed - 1, k - 1) / math.comb(n - 1, k - 1)
        return [0.0 if r is None else (up if r >= self.threshold else down) / std for r in rewards]

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        loss = clipped_surrogate(ratio, tokens.advantage, self.clip_low, self.clip_high)
        return loss, clip_metrics(ratio, tokens.advantage, self.clip_low, self.clip_high)


def credit_best(rewards: list[float | None]) -> list[float]:
    """Return the lead of the best sample over the second best, in standard deviations, and 0 for all others."""
    scored = sorted((r for r in rewards if r is not None), reverse=True)
    if len(scored) < 2 or scored[0] == scored[1]:
        return [0.0] * len(rewards)
    lead = (scored[0] - scored[1]) / reward_std(rewards)
    return [lead if r == scored[0] else 0.0 for r in rewards]
