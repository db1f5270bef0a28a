"""Second reward of held-out samples: `eval_reward`, which is logged and not trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from configs.rollout_schema import RewardConfig
from core.types.messages import Message
from core.types.samples import Sample
from rewards.rewarder import Rewarder
from rewards.weights import weigh_parts

PREFIX = "second/"
"""Prefix of the counts of a sample that hold the parts of the second reward."""
MEAN, FAILED = "mean", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondReward:
    """Weights of a second reward, and the processes of the functions."""

    config: RewardConfig
    rewards: Rewarder

    async def add(self, messages: list[Message], sample: Sample) -> Sample:
        """Return the sample with the second reward in `counts`. Raises UserError for the user's mistakes."""
        if sample.failure or sample.origin != "policy":
            return sample
        result = await self.rewards.compute_reward(sample.prompt, messages)
        found = {FAILED: 1.0}
        if not result.failure:
            parts = result.reward_parts
            found = parts | {FAILED: 0.0, MEAN: weigh_parts(self.config, parts, sample.prompt.source)}
        counts = sample.counts | {PREFIX + name: value for name, value in found.items()}
        return replace(sample, counts=counts, notes=[*sample.notes, *result.notes])
