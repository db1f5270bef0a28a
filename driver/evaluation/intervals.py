"""Confidence intervals of means over prompts, by the percentile bootstrap.

A prompt is drawn with all its samples: the samples of one prompt are no independent measurements of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.types.arrays import Floats

CONFIDENCE = 0.95
"""Probability that an interval covers the mean over all prompts of the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over prompts, and the bounds of its interval."""

    value: float
    low: float
    high: float


def estimate_means(values: Floats, *, resamples: int, seed: int) -> list[Estimate]:
    """Return the mean of every column of values [prompts, metrics] with its interval.

    The bounds are percentiles of the means of `resamples` draws of as many prompts, with replacement. All columns share
    the draws, so that differences between them are comparable.
    """
    n = len(values)
    if not n:
        raise ValueError("there is no prompt")
    draw = np.random.default_rng(seed)
    means = np.stack([values[draw.integers(n, size=n)].mean(axis=0) for _ in range(resamples)])
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail], axis=0)
    columns = zip(values.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True)
    return [Estimate(value=value, low=below, high=above) for value, below, above in columns]
