"""Credit assignment: from the rewards of a step to an advantage per token.

Rewards of sequences are Python floats, values of tokens are arrays; all computation is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from core.types.arrays import Floats
from core.types.samples import Group, Sample

ScaleRewards = Literal["none", "group", "batch", "mean"]


def group_advantages(
    rewards: Sequence[float | None],
    *,
    scale: ScaleRewards = "none",
    leave_one_out: bool = False,
    batch_std: float = 1.0,
    counted: Sequence[bool] | None = None,
) -> list[float]:
    """Compute rewards minus the group's mean, scaled, [G] -> [G].

    scale: divide by nothing, by the group's standard deviation (ddof 1, plus 1e-6), by `batch_std`, or by the group's
    mean reward (MaxRL, https://arxiv.org/abs/2602.02710; 0 unless the mean is positive). With rewards 0 and 1, MaxRL
    ascends the first G - 1 terms of log E R.
    leave_one_out: use the mean over the other samples (RLOO, https://arxiv.org/abs/2402.14740).
    counted: samples that the mean and the deviation count; None: all. The others are compared with their mean.
    A failed sample (None) is excluded from the statistics and gets 0. A group of equal rewards gets exactly 0, not
    rounding noise divided by epsilon.

    >>> group_advantages([1.0, 0.0, None])
    [0.5, -0.5, 0.0]
    >>> group_advantages([1.0, 0.0, 1.0], counted=[True, True, False])
    [0.5, -0.5, 0.5]
    """
    counts = [True] * len(rewards) if counted is None else counted
    scored = [r for r, counts_it in zip(rewards, counts, strict=True) if counts_it and r is not None]
    is_flat = len(scored) < 2 or max(scored) == min(scored)
    if len(scored) < 2 or (is_flat and (scale == "group" or all(counts))):
        return [0.0] * len(rewards)
    n = len(scored)
    # fsum rounds once, so the result does not depend on the order of the samples, which varies with timing.
    mean = math.fsum(scored) / n
    of_counted, of_others = (
        choose_factor(scale, n=n, mean=mean, std=reward_std(scored), batch_std=batch_std, leave_one_out=without)
        for without in (leave_one_out, False)  # the mean over the others of a sample that it does not count is the mean
    )

    def compare(reward: float | None, counts_it: bool) -> float:
        if reward is None or (counts_it and is_flat):
            return 0.0
        return (reward - mean) * (of_counted if counts_it else of_others)

    return [compare(r, counts_it) for r, counts_it in zip(rewards, counts, strict=True)]


def choose_factor(
    scale: ScaleRewards, *, n: int, mean: float, std: float, batch_std: float, leave_one_out: bool
) -> float:
    """Return the factor of n centred rewards; see group_advantages."""
    match scale:
        case "none":
            factor = 1.0
        case "group":
            factor = 1 / std
        case "batch":
            factor = 1 / batch_std
        case "mean":
            factor = 1 / mean if mean > 0 else 0.0
    if leave_one_out:
        # R_i - mean of the others = (R_i - mean of all) x n / (n - 1).
        factor *= n / (n - 1)
    return factor


def reward_std(rewards: Sequence[float | None]) -> float:
    """Return the standard deviation (ddof 1) of the rewards, without None, plus 1e-6; 1 for fewer than two rewards."""
    scored = [r for r in rewards if r is not None]
    if len(scored) < 2:
        return 1.0
    mean = math.fsum(scored) / len(scored)
    return (math.fsum((r - mean) ** 2 for r in scored) / (len(scored) - 1)) ** 0.5 + 1e-6


def whiten(values: Sequence[Floats]) -> list[Floats]:
    """Compute (x - mean) / sqrt(var + 1e-8) over all values of all rows, with the population's variance."""
    if not values or not (n := sum(map(len, values))):
        return [np.zeros(0) for _ in values]
    flat = np.concatenate(values, dtype=np.float64)
    # the mean of all rows: centring each row would remove the signal
    centred = flat - sum_terms(flat) / n
    done = centred * (sum_terms(centred**2) / n + 1e-8) ** -0.5
    return np.split(done, np.cumsum([len(row) for row in values])[:-1])


def whiten_tokens(samples: Sequence[Sample], credit: Sequence[float | Floats], counted: Sequence[bool]) -> list[Floats]:
    """Whiten advantages over the trained tokens of all counted samples; those of other samples become 0."""
    rows = [np.broadcast_to(a, s.n_trained) for s, a in zip(samples, credit, strict=True)]
    # over tokens and not samples, because a long sample has more terms in the loss
    whitened = iter(whiten([row for row, counts in zip(rows, counted, strict=True) if counts]))
    return [next(whitened) if counts else np.zeros(len(row)) for row, counts in zip(rows, counted, strict=True)]


def sum_terms(values: Floats) -> float:
    """Sum in extended precision and round once, so that the order of samples rarely affects a bit."""
    return float(np.sum(values, dtype=np.longdouble))


def spread_over_sample(sample: Sample, values: float | Floats) -> Floats:
    """Place values of the trained tokens (a number for all, or an array) at their positions, [L]; 0 elsewhere."""
    spread = np.zeros(len(sample.token_ids), dtype=sample.float_dtype)
    spread[sample.loss_mask] = values
    return spread


def with_advantages(groups: list[Group], per_token: Sequence[float | Floats]) -> list[Group]:
    """Set advantages; `per_token` has for each sample a number, or a value per trained token."""
    rows = iter(per_token)
    return [[s.replace(advantage=spread_over_sample(s, next(rows))) for s in g] for g in groups]
