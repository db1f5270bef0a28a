"""OTB: REINFORCE with the optimal baseline of each token (https://arxiv.org/abs/2602.07078).

    w_s = 1 - 2 pi(y_s) + sum_v pi(v)^2          squared norm of the gradient of log pi(y_s) by the logits
    W_t = sum_{s <= t} w_s
    b_t = sum_j R_j W_{j,t} / sum_j W_{j,t}      over the completions of the group with t trained tokens or more
    L_t = -(R - b_t) log pi(y_t)                 pi in w and W: the policy at the start of the step

t counts trained tokens, so the tokens of tools leave no gap. Where one completion is longer than all others, b_t = 0.

Others: verl's version for single turns counts positions, and takes counts of tokens for positions where masks have
gaps; the version for several turns is this one.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from algs.base import Metrics, PolicyGradient
from algs.credit import with_advantages
from core.types.arrays import Floats
from core.types.measures import Measure
from core.types.samples import Group, Policy, Sample, ScoredColumn, Tokens


class OTB(PolicyGradient):
    @property
    def needs_siblings(self) -> bool:
        return True

    @property
    def measures(self) -> dict[str, Measure]:
        return {**super().measures, "collision": Measure(lambda s, at: (2 * s).exp().sum(-1))}

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        columns: frozenset[ScoredColumn] = frozenset({"prox_logp", "prox.collision"})
        return super().required_columns | columns

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return with_advantages(groups, [gained for group in groups for gained in self.compare(group)])

    def compare(self, group: Group) -> list[Floats]:
        """Return the advantage of each trained token, [n] per sample; 0 without a reward or a sibling with one."""
        rewards = [self.penalised_reward(s) for s in group]
        scored = {
            i: (r, self.sum_energy(group[i])) for i, r in enumerate(rewards) if r is not None and group[i].n_trained
        }
        if len(scored) < 2:
            return [np.zeros(s.n_trained) for s in group]
        lengths = sorted(len(energy) for _, energy in scored.values())
        above, below = np.zeros(lengths[-1]), np.full(lengths[-1], 1e-8)
        for reward, energy in scored.values():
            above[: len(energy)] += reward * energy
            below[: len(energy)] += energy
        baseline = above / below
        baseline[lengths[-2] :] = 0.0  # nobody to compare with
        return [
            scored[i][0] - baseline[: s.n_trained] if i in scored else np.zeros(s.n_trained)
            for i, s in enumerate(group)
        ]

    def sum_energy(self, sample: Sample) -> Floats:
        """Return W of each trained token, [n]."""
        logp, collision = (
            sample.columns[c][sample.loss_mask].astype(np.float64) for c in ("prox_logp", "prox.collision")
        )
        return np.cumsum(1 - 2 * np.exp(logp) + collision)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantage * policy.logp, {}
