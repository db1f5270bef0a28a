"""Prioritised replay of prompts: rows whose last group had large advantages are drawn more often.

P(x) ~ (spread_x + epsilon)^alpha, with spread_x the mean |R_i - mean R| of the row's last group, its mean |A_i| under a
baseline of the group's mean. A row without results has the largest spread of all.

It follows the rewards' noise, too. Schaul's importance weights are not applied: the run optimises the rows as drawn.

Paper: Schaul et al., Prioritized Experience Replay, arXiv:1511.05952, here of prompts in place of transitions.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_feeds.samplers.base import History, Rows, Sampler, take_weighted


class Priority(Sampler):
    alpha: float = Field(0.6, ge=0)
    """0: all rows alike. 1: proportional to the spread."""
    epsilon: float = Field(0.01, gt=0)
    """Added to the spread, so that a row whose samples agreed comes again."""

    def choose(self, pool: Rows, history: History, *, count: int, rng: np.random.Generator) -> Rows:
        seen = history.seen[pool]
        largest = history.spread[pool].max() if seen.any() else 1.0
        spread = np.where(seen, history.spread[pool], largest)
        return take_weighted(pool, (spread + self.epsilon) ** self.alpha, count, rng)
