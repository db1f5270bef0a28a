"""Pools by difficulty: a row is admitted to the next step with the weight of the pool that its last group puts it in.

The pools are unseen, hard (pass rate up to `hard_below`), easy (above `easy_above`) and normal.

A pass rate of few samples is noisy: of 8 samples at 1/2 its standard deviation is 0.18, so rows change pools by chance.

Others: prime-rl's pools of easy, normal and hard problems, with these weights.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from pydantic import Field, model_validator

from data_feeds.samplers.base import History, Rows, Sampler, take_weighted


class Pools(Sampler):
    unseen: float = Field(1.0, gt=0)
    """Weight of a row without results."""
    hard: float = Field(0.2, ge=0)
    """Weight of a hard row; 0: it is not drawn again."""
    normal: float = Field(1.0, ge=0)
    easy: float = Field(0.2, ge=0)
    """Weight of an easy row; 0: it is not drawn again."""
    hard_below: float = Field(0.25, ge=0, le=1)
    easy_above: float = Field(0.75, ge=0, le=1)

    @model_validator(mode="after")
    def pools_are_apart(self) -> Self:
        if self.hard_below >= self.easy_above:
            raise ValueError(f"hard_below={self.hard_below:g} must be below easy_above={self.easy_above:g}")
        return self

    def choose(self, pool: Rows, history: History, *, count: int, rng: np.random.Generator) -> Rows:
        rate = history.last_rate[pool]
        weight = np.where(rate <= self.hard_below, self.hard, np.where(rate > self.easy_above, self.easy, self.normal))
        return take_weighted(pool, np.where(history.seen[pool], weight, self.unseen), count, rng)
