"""REINFORCE++: no critic and no group needed; advantages whitened over the whole step
(https://arxiv.org/abs/2501.03262).

    G_t = sum_{t' >= t} gamma^(t' - t) r_t'        r: the reward at the last token, -coef x k1 at each if set
    A_t = (G_t - mean G) / std G                    over all tokens of the step, all ranks
    L_t = max(-r_t A, -clip(r_t, 1 - low, 1 + high) A)

baseline: true first subtracts the mean reward of the group (REINFORCE++-baseline); the paper then has
kl: {coef: ..., estimator: k2} in the loss.

credit: turn uses G_k = sum_{k' >= k} turn_discount^(k' - k) r_k' at all tokens of turn k, with gamma 1.

Others: verl whitens with the sample's variance, we and OpenRLHF with the population's; slime subtracts coef x k1 from
the advantage of each token instead of adding it to the reward.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field
from torch import Tensor

from algs.base import Metrics, TurnCredit, with_advantages
from algs.credit import group_advantages, whiten
from algs.ops import clip_metrics, clipped_surrogate, importance_ratio
from algs.turns import number_turns, reward_to_go, rewards_of_tokens, turn_advantages
from core.types.arrays import Floats
from core.types.samples import Group, Policy, Sample, Tokens


class ReinforcePP(TurnCredit):
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    gamma: float = Field(1.0, gt=0, le=1)
    baseline: bool = False

    @property
    def needs_siblings(self) -> bool:
        return self.baseline

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        returns = self._turn_returns(groups) if self.credit == "turn" else self._episode_returns(groups)
        return with_advantages(groups, whiten(returns))

    def _turn_returns(self, groups: list[Group]) -> list[Floats]:
        """Return the return of each token's turn, [n] by sample; with `baseline` minus the group's mean."""
        per_turn = [[self.turn_returns(s) for s in g] for g in groups]
        if self.baseline:
            compared = [a for g in per_turn for a in turn_advantages(g)]
        else:
            compared = [np.zeros(1) if r is None else r for g in per_turn for r in g]
        samples = (s for g in groups for s in g)
        return [a[number_turns(s)] for s, a in zip(samples, compared, strict=True)]

    def _episode_returns(self, groups: list[Group]) -> list[Floats]:
        samples = [s for g in groups for s in g]
        rewards = [r for g in groups for r in self._sequence_rewards(g)]
        return [self._token_returns(s, r) for s, r in zip(samples, rewards, strict=True)]

    def _sequence_rewards(self, group: Group) -> list[float]:
        """Return the reward of each completion, without the KL term; with `baseline` minus the group's mean."""
        whole = [None if s.reward is None else s.reward + self.overlong.compute_penalty(s) for s in group]
        # a failed sample has no trained token, so its 0 reaches no mean
        return group_advantages(whole) if self.baseline else [r or 0.0 for r in whole]

    def _token_returns(self, sample: Sample, reward: float) -> Floats:
        return reward_to_go(self.kl_rewards(sample) + rewards_of_tokens(sample, reward), self.gamma)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        loss = clipped_surrogate(ratio, tokens.advantage, self.clip_low, self.clip_high)
        return loss, clip_metrics(ratio, tokens.advantage, self.clip_low, self.clip_high)
