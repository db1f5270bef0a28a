"""GDPO: GRPO with each part of the reward normalised by itself (https://arxiv.org/abs/2601.05242, Eq. 4-6).

    z_i = sum_k (R_ik - mean_j R_jk) / (std_j R_jk + eps)       over the group, for each part k of the reward
    A_i = (z_i - mean z) / (std z + eps)                        over the step

A sum of parts of different scale hides the small ones, and different rewards with equal sums look alike. Every part
counts the same here, whatever reward.weights says. A reward without parts is one part.

over: sequence, TRL's normalize_then_sum (eps 1e-4); token, verl's, where each sequence counts with all tokens and the
variance, not its root, has 1e-8 added (eps of the groups 1e-6). Both divide by n - 1.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import model_validator

from algs.base import with_advantages
from algs.grpo import GRPO
from core.types.samples import Group, Sample


class GDPO(GRPO):
    over: Literal["sequence", "token"] = "sequence"
    """Unit over which the sums of a step are normalised."""

    @model_validator(mode="after")
    def reads_the_parts_alone(self) -> GDPO:
        if self.kl.in_reward or self.overlong.mode == "penalty" or self.credit == "turn":
            raise ValueError(
                "GDPO reads the parts of the reward: kl.place: reward, overlong.mode: penalty and credit: turn would "
                "do nothing"
            )
        if self.scale_rewards != "none" or self.leave_one_out or self.whiten:
            raise ValueError("GDPO has its own scale: leave out scale_rewards, leave_one_out and whiten")
        return self

    def accept_group(self, group: Group) -> bool:
        return not self.dynamic_sampling or any(z for z in self.sum_parts(group))

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        samples = [s for g in groups for s in g]
        sums = [z for g in groups for z in self.sum_parts(g)]
        sizes = [0 if s.reward is None else s.n_trained if self.over == "token" else 1 for s in samples]
        n = sum(sizes)
        mean = math.fsum(z * size for z, size in zip(sums, sizes, strict=True)) / max(1, n)
        squares = math.fsum(size * (z - mean) ** 2 for z, size in zip(sums, sizes, strict=True)) / max(1, n - 1)
        scale = math.sqrt(squares + 1e-8) if self.over == "token" else math.sqrt(squares) + 1e-4
        return with_advantages(
            groups, [(z - mean) / scale if size else 0.0 for z, size in zip(sums, sizes, strict=True)]
        )

    def sum_parts(self, group: Group) -> list[float]:
        """Return the sum of each sample's normalised parts; 0 without a reward."""
        parts = [list_parts(s) for s in group]
        sums = [0.0] * len(group)
        for name in sorted({name for own in parts for name in own}):
            values = [own[name] for own in parts if name in own]
            if min(values) == max(values):
                continue
            mean = math.fsum(values) / len(values)
            std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
            eps = 1e-6 if self.over == "token" else 1e-4
            sums = [
                z + (own[name] - mean) / (std + eps) if name in own else z for z, own in zip(sums, parts, strict=True)
            ]
        return sums


def list_parts(sample: Sample) -> dict[str, float]:
    """Return the parts of a sample's reward, or the reward as the only part; {} without one."""
    if sample.reward is None:
        return {}
    return sample.reward_parts or {"reward": sample.reward}
