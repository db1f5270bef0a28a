"""No positive resampling: a row that the policy passes nearly always is not drawn again.

A row is retired if at least `least_samples` samples have a pass rate of `threshold` or more. The others come in the
order of a pass, the least drawn first.

What the policy forgets on a retired row is not seen in training: measure it by `data.eval`.

Paper: The Art of Scaling Reinforcement Learning Compute for LLMs (ScaleRL), arXiv:2510.13786. Others: open-instruct's
`no_resampling_pass_rate`.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from core.errors import RunStopped
from data_feeds.samplers.base import History, Rows, Sampler, take_best


class NoPositive(Sampler):
    threshold: float = Field(0.9, gt=0, le=1)
    """Pass rate from which a row is retired."""
    least_samples: int = Field(8, ge=1)
    """Samples that a row must have before it is retired."""

    def choose(self, pool: Rows, history: History, *, count: int, rng: np.random.Generator) -> Rows:
        samples = history.samples[pool]
        is_retired = (samples >= self.least_samples) & (history.passed[pool] >= self.threshold * samples)
        left = pool[~is_retired]
        if not len(left):
            raise RunStopped(
                f"data.sampler: all rows are retired, with a pass rate of {self.threshold:g} or more: raise "
                "data.sampler.threshold, or bring harder rows"
            )
        return take_best(left, -history.drawn[left], count)
