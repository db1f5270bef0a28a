"""Samples of rewarded episodes: parts and weights become the reward of a sample, of turns and of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.agent_schema import TIMEOUTS
from configs.rollout_schema import RewardConfig
from core.errors import UserError
from core.types.samples import Sample
from rewards.scored import RewardResult
from rewards.weights import find_weights, list_missing, weigh_parts, weigh_turns
from rollouts.token_parts import add_token_rewards, join_turns
from rollouts.transcript import Tokenizer
from rollouts.turns import Played


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Played episode, and the results of its rewards."""

    played: list[Played]
    """One per player, or per branch of an agent's conversations."""
    results: list[RewardResult]
    """One per player; a single one for an agent."""
    is_shared: bool = False
    """True if all branches share the result."""


@dataclass(frozen=True, slots=True)
class RewardedSamples:
    """Maker of samples by the weights of a recipe."""

    reward: RewardConfig
    tokenizer: Tokenizer
    of_agent: bool
    """Whether the episodes are those of `rollout.agent`."""

    def make(self, episode: Episode) -> list[Sample]:
        """Return the samples of an episode with their rewards."""
        if not episode.is_shared:
            return [self._add_result(*one) for one in zip(episode.played, episode.results, strict=True)]
        [result] = episode.results
        if len(episode.played) > 1 and (result.turn_parts or result.token_parts):
            why = "turn_parts and token_parts are of one conversation, and this episode has several branches"
            result = RewardResult(failure=why, notes=result.notes, counts=result.counts)
        first = self._add_result(episode.played[0], result)
        shared: dict[str, Any] = {"reward": first.reward, "reward_parts": first.reward_parts, "failure": first.failure}
        return [first, *(one.sample.replace(**shared) for one in episode.played[1:])]

    def _add_result(self, played: Played, result: RewardResult) -> Sample:
        sample, prompt = played.sample, played.sample.prompt
        if sample.failure:
            return sample
        counts = sample.counts | result.counts
        told: dict[str, Any] = {"notes": [*result.notes], "counts": counts}
        if result.failure:
            return sample.replace(**told, failure=result.failure, reward_parts={})
        # a silent overwrite would drop one of the two numbers
        twice = result.reward_parts.keys() & sample.reward_parts.keys()
        # the number of replies, which that reward returns for want of another, gives way to the environment's own
        if twice and self.reward.function != "environment":
            who = "agent" if self.of_agent else "environment"
            raise UserError(f"reward and {who} both return a part {min(twice)!r}: rename one of them")
        parts = result.reward_parts | sample.reward_parts
        if counts.get(TIMEOUTS):
            # the agent had no time to return them
            parts = dict.fromkeys(list_missing(self.reward, parts, prompt.source), 0.0) | parts
        weights = find_weights(self.reward, parts, prompt.source)
        try:
            turns = join_turns(sample, played.turn_scores, result.turn_parts)
            sample = add_token_rewards(sample, result, weights, self.tokenizer.decode)
        except ValueError as error:
            return sample.replace(**told, failure=str(error), reward_parts={})
        return sample.replace(
            **told,
            reward_parts=parts,
            reward=weigh_parts(weights, parts),
            turn_rewards=weigh_turns(weights, turns),
        )
