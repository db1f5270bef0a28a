"""PPO: proximal policy optimisation with a value model (https://arxiv.org/abs/1707.06347, Eq. 7, 9, 11).

    delta_t = r_t + gamma V_{t+1} - V_t           r_t: the reward at the last token, -coef x k1 at each if set
    A_t = delta_t + gamma lam A_{t+1},  R_t = A_t + V_t      (GAE, https://arxiv.org/abs/1506.02438, Eq. 16)
          R_t with critic_lam in place of lam, if set        (VC-PPO, https://arxiv.org/abs/2503.01491)
    L_t = max(-r_t A, -clip(r_t, 1 - low, 1 + high) A)       A whitened over the step's tokens
    V-loss_t = 1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)       the second only with value_clip

The value model is a copy of the policy's transformer with a scalar head, initialised to zero, and a separate optimizer.
V_t is read at the position that predicts token t. Tokens of the environment are skipped. Both models are saved at the
end.

A sample with the column token_rewards earned these shares of the reward at its tokens, and the rest at the last one.
critic_warmup: in the first steps the value model is trained alone, on samples of the start model (VC-PPO).

bootstrap_truncated: a completion cut off by the budget did not end there. The last token is not trained on, and the
value before it replaces the missing return; by default the episode counts as over (TRL, verl, OpenRLHF).

credit: turn treats a turn as an action: r_k is the turn's reward, V_k the value before its first token, turn_discount
replaces gamma, and all tokens of the turn share A_k and R_k.

Others: TRL adds 0.1 x V-loss to one shared loss; verl clips doubly (dual_clip: 3) by default; slime omits the 1/2.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from algs.base import Metrics, TurnCredit
from algs.credit import spread_over_sample, whiten
from algs.ops import clip_metrics, clipped_surrogate, importance_ratio
from algs.turns import generalised_advantages, number_turns, rewards_of_tokens
from core.strict_model import LearningRate
from core.types.arrays import Floats
from core.types.samples import Group, Policy, Sample, ScoredColumn, Tokens


class PPO(TurnCredit):
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    critic_lam: float | None = Field(None, ge=0, le=1)
    """Lambda of the value model's targets; 1: the returns themselves. Unset: lam."""
    whiten: bool = True
    """Normalise the advantages of a step's tokens to mean 0 and variance 1; returns are unchanged."""
    value_clip: float | None = Field(None, gt=0)
    bootstrap_truncated: bool = False
    critic_lr: LearningRate = 1e-5
    """Peak learning rate of the value model, with the trainer's schedule and other settings."""
    critic_warmup: int = Field(0, ge=0)
    """Steps of the run in which only the value model is trained; the learning rate's schedule runs meanwhile."""

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        columns: frozenset[ScoredColumn] = frozenset({"values"})
        return super().required_columns | columns

    @property
    def value_lr(self) -> float:
        return self.critic_lr

    @property
    def trains_policy(self) -> bool:
        return self.step_number >= self.critic_warmup

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        samples = [self._without_last(s) for g in groups for s in g]
        values = [self._values_before(s) for s in samples]
        estimate = self._credit_turns if self.credit == "turn" else self._credit_tokens
        advantages = [estimate(s, v, self.lam) for s, v in zip(samples, values, strict=True)]
        targets = advantages
        if self.critic_lam is not None:
            targets = [estimate(s, v, self.critic_lam) for s, v in zip(samples, values, strict=True)]
        # Before whitening: the value model regresses on returns in the units of the reward.
        returns = [a + v for a, v in zip(targets, values, strict=True)]
        rows = zip(samples, whiten(advantages) if self.whiten else advantages, returns, strict=True)
        done = (
            s.replace(advantage=spread_over_sample(s, a), columns=s.columns | {"returns": spread_over_sample(s, r)})
            for s, a, r in rows
        )
        return [[next(done) for _ in g] for g in groups]

    def _without_last(self, sample: Sample) -> Sample:
        if not (self.bootstrap_truncated and sample.stop == "length"):
            return sample
        # the value before the last token stands in for the return from it on, so that token has no return of its own
        return sample.replace(excluded=np.arange(1, len(sample.action_mask) + 1) == len(sample.action_mask))

    def _values_before(self, sample: Sample) -> Floats:
        """Return the value before each trained token, [n]; with credit: turn, before the turn's first token."""
        if not sample.n_trained:
            return np.zeros(0)
        values = sample.columns["values"][sample.loss_mask].astype(np.float64)
        if self.credit == "turn":
            _, first, own = np.unique(number_turns(sample), return_index=True, return_inverse=True)
            return values[first][own]
        return values

    def _credit_tokens(self, sample: Sample, values: Floats, lam: float) -> Floats:
        if not sample.n_trained:
            return np.zeros(0)
        assert sample.reward is not None
        whole = sample.reward + self.overlong.compute_penalty(sample)
        rewards = self.kl_rewards(sample) + rewards_of_tokens(sample, whole)
        bootstrap = self._value_at_the_cut(sample)
        return generalised_advantages(rewards, values, gamma=self.gamma, lam=lam, bootstrap=bootstrap)

    def _credit_turns(self, sample: Sample, values: Floats, lam: float) -> Floats:
        rewards = self.turn_rewards(sample)
        if rewards is None or not sample.n_trained:
            return np.zeros(sample.n_trained)
        there, first, own = np.unique(number_turns(sample), return_index=True, return_inverse=True)
        # what a turn without a trained token earned counts with the one before it
        holders = np.searchsorted(there, np.arange(len(rewards)), side="right").clip(1) - 1
        earned = np.zeros(len(there))
        np.add.at(earned, holders, rewards)
        earned[-1] += self._value_at_the_cut(sample)  # within the last turn, so it is not discounted
        return generalised_advantages(earned, values[first], gamma=self.turn_discount, lam=lam)[own]

    def _value_at_the_cut(self, sample: Sample) -> float:
        """Return the value before the last token if the budget cut off the episode and it is excluded; otherwise 0."""
        return 0.0 if sample.excluded is None else float(sample.columns["values"][-1])

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        loss = clipped_surrogate(ratio, tokens.advantage, self.clip_low, self.clip_high, self.dual_clip)
        return loss, clip_metrics(ratio, tokens.advantage, self.clip_low, self.clip_high)

    def value_loss(self, values: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        error = (values - tokens.returns).square()
        if self.value_clip is not None:
            # The larger of the two errors: a clipped value may not be rewarded for moving too far.
            near = tokens.values + (values - tokens.values).clamp(-self.value_clip, self.value_clip)
            error = torch.maximum(error, (near - tokens.returns).square())
        gap = tokens.returns - values.detach()
        return error / 2, {
            "value/mean": values.detach(),
            "value/return": tokens.returns,
            "value/return_sq": tokens.returns.square(),  # with the next two: the explained variance
            "value/error": gap,
            "value/error_sq": gap.square(),
        }
