"""Estimators of pass@k, pass^k and majority@k from n samples of a prompt, c of which pass, for k <= n.

    pass@k      probability that at least one of k samples passes: 1 - C(n-c, k) / C(n, k)
    pass^k      probability that all of k samples pass: C(c, k) / C(n, k)
    majority@k  probability that the most common answer of k samples passes

All are unbiased: their expectation does not depend on n (https://arxiv.org/abs/2107.03374 for pass@k).

Intervals of means over prompts are by the percentile bootstrap. A prompt is drawn with all its samples, because samples
of the same prompt are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from core.types.arrays import Floats

CONFIDENCE = 0.95
"""Probability that an interval covers the mean over all prompts of the same kind."""


def choose_ks(samples: int) -> list[int]:
    """Return the powers of two up to `samples`, and `samples` itself.

    >>> choose_ks(6)
    [1, 2, 4, 6]
    """
    powers = [2**i for i in range(samples.bit_length())]
    return powers if powers[-1] == samples else [*powers, samples]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k samples passes, from c of n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    # Of exact integers, so that no product of many fractions rounds.
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that all of k samples pass, from c of n.

    >>> pass_hat_k(4, 2, 2) == 1 / 6
    True
    """
    return comb(c, k) / comb(n, k)


def majority_at_k(answers: Sequence[str], passes: Sequence[bool], k: int) -> float:
    """Estimate the probability that the most common answer of k samples passes.

    It averages over n // k consecutive blocks of k samples. Equally common answers share a block's vote. An answer that
    passes only in some samples counts by the fraction.

    >>> majority_at_k(["7", "7", "8", "8"], [True, True, False, False], 4)
    0.5
    """
    # Disjoint blocks are unbiased; an average over all subsets would have less variance, but C(n, k) terms.
    blocks = range(len(answers) // k)
    votes = (_count_vote(answers[b * k : (b + 1) * k], passes[b * k : (b + 1) * k]) for b in blocks)
    return sum(votes) / len(blocks)


def _count_vote(answers: Sequence[str], passes: Sequence[bool]) -> float:
    """Return the mean pass fraction of the most common answers."""
    cast: dict[str, list[bool]] = {}
    for answer, passed in zip(answers, passes, strict=True):
        cast.setdefault(answer, []).append(passed)
    most = max(map(len, cast.values()))
    winners = [sum(of) / len(of) for of in cast.values() if len(of) == most]
    return sum(winners) / len(winners)


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
    # A fixed seed, so that equal samples give equal intervals.
    draw = np.random.default_rng(seed)
    means = np.stack([values[draw.integers(n, size=n)].mean(axis=0) for _ in range(resamples)])
    # In percent, half of the rest on either side.
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail], axis=0)
    columns = zip(values.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True)
    return [Estimate(value=value, low=below, high=above) for value, below, above in columns]
