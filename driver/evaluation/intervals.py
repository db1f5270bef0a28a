"""Confidence intervals of means over prompts, by the percentile bootstrap.

A prompt is drawn with all its samples, because samples of the same prompt are not independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.types.arrays import Floats

CONFIDENCE = 0.95
"""Probability that an interval covers the mean over all prompts of the same kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over prompts, with interval bounds."""

    value: float
    low: float
    high: float


def estimate_means(values: Floats, *, resamples: int, seed: int) -> list[Estimate]:
    """Return mean and interval of every column of values [prompts, metrics].

    The bounds are percentiles over `resamples` draws of as many prompts, with replacement. All columns share the draws,
    so that they can be compared.
    """
    n = len(values)
    if not n:
        raise ValueError("there is no prompt")
    # A fixed seed, so that equal samples give equal intervals.
    draw = np.random.default_rng(seed)
    means = np.stack([values[draw.integers(n, size=n)].mean(axis=0) for _ in range(resamples)])
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail], axis=0)
    columns = zip(values.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True)
    return [Estimate(value=value, low=below, high=above) for value, below, above in columns]
