"""Second reward of held-out samples: `eval_reward`, which is logged and not trained on."""

from __future__ import annotations

from dataclasses import dataclass

from configs.rollout_schema import RewardConfig
from core.errors import UserError
from core.types.messages import Message
from core.types.notes import Note
from core.types.samples import Sample
from rewards.rewarder import Rewarder
from rewards.weights import find_weights, weigh_parts

PREFIX = "second/"
"""Prefix of the counts of a sample that hold the parts of the second reward."""
MEAN, FAILED = "mean", "failed"
TAKEN = {MEAN, FAILED, "corr"}
"""Names of metrics beside the parts, which no part may have."""
AUTHOR = "eval_reward"
"""Author of the note that says why the second reward failed."""


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
        found, notes = {FAILED: 1.0}, [*sample.notes, *result.notes]
        if result.failure:
            notes.append(Note(by=AUTHOR, text=result.failure))
        else:
            parts = result.reward_parts
            if taken := sorted(TAKEN & parts.keys()):
                raise UserError(
                    f"eval_reward returns a part {taken[0]!r}, and eval/second_reward/{taken[0]} is another metric: "
                    "rename the part"
                )
            weights = find_weights(self.config, parts, sample.prompt.source)
            found = parts | {FAILED: 0.0, MEAN: weigh_parts(weights, parts)}
        counts = sample.counts | {PREFIX + name: value for name, value in found.items()}
        # calls of a judge, which both rewards may ask
        for name, value in result.counts.items():
            counts[name] = counts.get(name, 0.0) + value
        return sample.replace(counts=counts, notes=notes)
