"""Credit assignment: from the rewards of a step to an advantage for every token. Floats, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

ScaleRewards = Literal["none", "group", "batch", "mean"]


def group_advantages(
    rewards: Sequence[float | None],
    *,
    scale: ScaleRewards = "none",
    leave_one_out: bool = False,
    batch_std: float = 1.0,
) -> list[float]:
    """Compute the reward above the group's mean, [G] -> [G].

    scale: divide by nothing, by the group's standard deviation (ddof 1, plus 1e-6), by `batch_std`, or by the group's
    mean reward (MaxRL, https://arxiv.org/abs/2602.02710: 0 where the mean is not positive). With rewards 0 and 1, the
    last one ascends the first G - 1 terms of log E R.
    leave_one_out: take the mean over the other samples (RLOO, https://arxiv.org/abs/2402.14740).
    A failed sample (None) is excluded from the statistics and gets 0. A group without two different rewards
    gets exactly 0, not rounding noise divided by epsilon.

    >>> group_advantages([1.0, 0.0, None])
    [0.5, -0.5, 0.0]
    """
    scored = [r for r in rewards if r is not None]
    if len(scored) < 2 or max(scored) == min(scored):
        return [0.0] * len(rewards)
    n = len(scored)
    mean = math.fsum(scored) / n
    match scale:
        case "none":
            factor = 1.0
        case "group":
            factor = 1 / reward_std(rewards)
        case "batch":
            factor = 1 / batch_std
        case "mean":
            factor = 1 / mean if mean > 0 else 0.0
    if leave_one_out:
        factor *= n / (n - 1)
    return [0.0 if r is None else (r - mean) * factor for r in rewards]


def reward_std(rewards: Sequence[float | None]) -> float:
    """Return the standard deviation (ddof 1) of the rewards that are not None, plus 1e-6; 1 if fewer than two."""
    scored = [r for r in rewards if r is not None]
    if len(scored) < 2:
        return 1.0
    mean = math.fsum(scored) / len(scored)
    return (math.fsum((r - mean) ** 2 for r in scored) / (len(scored) - 1)) ** 0.5 + 1e-6


def reward_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """Compute G_t = r_t + gamma G_{t+1} over the trained tokens of one sample, [n] -> [n]."""
    done: list[float] = []
    following = 0.0
    for r in reversed(rewards):
        following = r + gamma * following
        done.append(following)
    return done[::-1]


def generalised_advantages(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float, bootstrap: float = 0.0
) -> list[float]:
    """Compute GAE over the trained tokens of one sample, [n] -> [n]  (https://arxiv.org/abs/1506.02438, Eq. 16).

    values[t] is the value of the state before token t; `bootstrap` is that of the state after the last one, 0 where
    the episode ended. Other tokens in between are skipped: the next value is that of the next trained token.
    """
    done: list[float] = []
    advantage, following = 0.0, bootstrap
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        advantage = r + gamma * following - v + gamma * lam * advantage
        following = v
        done.append(advantage)
    return done[::-1]


def whiten(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Compute (x - mean) / sqrt(var + 1e-8) over all numbers of all rows, with the variance of the population."""
    flat = [x for row in values for x in row]
    if not flat:
        return [list(row) for row in values]
    mean = math.fsum(flat) / len(flat)
    scale = (math.fsum((x - mean) ** 2 for x in flat) / len(flat) + 1e-8) ** -0.5
    return [[(x - mean) * scale for x in row] for row in values]


def overlong_penalty(tokens: int, *, max_tokens: int, buffer: int) -> float:
    """Return 0 up to max_tokens - buffer tokens, then down to -1 (https://arxiv.org/abs/2503.14476, Eq. 13)."""
    return max(-1.0, min(0.0, (max_tokens - buffer - tokens) / buffer))
