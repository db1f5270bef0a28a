"""Thompson sampling by difficulty: draw a pass rate for each row, and take those nearest to one half.

p_x ~ Beta(1 + passed_x, 1 + failed_x); the rows with the highest p_x (1 - p_x), the variance of a pass, are drawn.

A row without results has any difficulty with the same probability, so new rows are tried; `forget` keeps the belief
wide enough to notice that a row has become easy.

Paper: Thompson, 1933 (Biometrika 25). Others: marin (experiments with RL on mathematics) draws prompts so.
"""

from __future__ import annotations

import numpy as np

from data_feeds.samplers.base import History, Rows, Sampler, take_best


class Thompson(Sampler):
    def choose(self, pool: Rows, history: History, *, count: int, rng: np.random.Generator) -> Rows:
        passed, samples = history.passed[pool], history.samples[pool]
        rate = rng.beta(1 + passed, 1 + samples - passed)
        return take_best(pool, rate * (1 - rate), count)
