"""ScaleRL: CISPO on the prompts that teach (https://arxiv.org/abs/2510.13786, Sec. 3-4).

    A_i = (R_i - mean_j R_j) / std                              std: over the step's centred rewards, population's
    L_t = -sg[min(pi / pi_rollout, max_weight)] A log pi(a_t)   mean over tokens of a prompt, then over prompts

A prompt of equal rewards is left out: of the loss, of the mean, and of the standard deviation. Its place is not filled
with another prompt (that would be dynamic_sampling).

Others: SkyRL keeps such prompts in the mean over prompts. The paper's cap is 4 to 8.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from algs.base import with_advantages
from algs.cispo import CISPO
from algs.credit import group_advantages
from algs.terms import Correction
from core.types.samples import Group, LossNorm


class ScaleRL(CISPO):
    loss_norm: LossNorm = "prompt"
    anchor: Literal["prox", "rollout"] = "rollout"
    correction: Correction = Correction(level="none")

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        centred = [group_advantages([self.penalised_reward(s) for s in g]) for g in groups]
        taught = [any(own) for own in centred]
        scored = [
            a
            for g, own in zip(groups, centred, strict=True)
            if any(own)
            for s, a in zip(g, own, strict=True)
            if s.reward is not None
        ]
        if not scored:  # an update needs a token; at advantage 0 it teaches nothing
            return with_advantages(groups, [0.0 for g in groups for _ in g])
        scale = math.sqrt(math.fsum(a * a for a in scored) / len(scored)) + 1e-8
        kept = [
            g if teaches else [s.replace(excluded=np.ones_like(s.action_mask)) for s in g]
            for g, teaches in zip(groups, taught, strict=True)
        ]
        return with_advantages(kept, [a / scale for own in centred for a in own])
