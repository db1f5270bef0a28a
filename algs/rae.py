"""RAE: REINFORCE with a running mean of each role's rewards as the baseline (SPIRAL, https://arxiv.org/abs/2506.24119).

    A   = R - b_role                                  role: the source of the prompt, and the player
    L_t = -A log pi(a_t)                              no ratio, no clip
    b_role <- decay b_role + (1 - decay) mean R       over the role's samples of the step, after it; from 0 on

A group needs no second sample. The whole step has the baselines that the step before left, so the advantages do not
depend on the order in which episodes finish.

Others: prime-rl moves b after each episode and does not save it; b moved before it is subtracted shrinks every
advantage by the decay.
"""

from __future__ import annotations

import math

from pydantic import Field
from torch import Tensor

from algs.base import Metrics, PolicyGradient, with_advantages
from algs.state import StepSeen
from core.types.arrays import Floats
from core.types.samples import Group, Policy, Sample, Tokens


class RAE(PolicyGradient):
    decay: float = Field(0.95, ge=0, lt=1)
    """Share of a baseline that a step leaves."""

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return with_advantages(groups, [self.compare(s) for g in groups for s in g])

    def compare(self, sample: Sample) -> float:
        """Return the reward minus the role's baseline; 0 without a reward."""
        reward = self.penalised_reward(sample)
        return 0.0 if reward is None else reward - float(self.state.get(name_role(sample), 0.0))

    def next_state(self, step: StepSeen) -> dict[str, float | Floats]:
        means = {
            role: math.fsum(own) / len(own) for role, own in step.group_by(name_role, self.penalised_reward).items()
        }
        moved = {r: self.decay * self.state.get(r, 0.0) + (1 - self.decay) * mean for r, mean in means.items()}
        return {**self.state, **moved}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantage * policy.logp, {}


def name_role(sample: Sample) -> str:
    """Return the name of the role's baseline in the state."""
    player = f"player{sample.player}"
    return f"{sample.prompt.source}.{player}" if sample.prompt.source else player
