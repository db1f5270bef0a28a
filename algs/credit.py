"""Credit assignment: from the rewards of a step to an advantage for every token.

Rewards of sequences are Python floats, what is known of tokens are arrays; all of it is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from core.types.arrays import Floats
from core.types.samples import Group, Sample

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
    factor = choose_factor(
        scale, n=n, mean=mean, std=reward_std(rewards), batch_std=batch_std, leave_one_out=leave_one_out
    )
    return [0.0 if r is None else (r - mean) * factor for r in rewards]


def choose_factor(
    scale: ScaleRewards, *, n: int, mean: float, std: float, batch_std: float, leave_one_out: bool
) -> float:
    """Return what n centred rewards are multiplied by; see group_advantages."""
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
        factor *= n / (n - 1)
    return factor


def reward_std(rewards: Sequence[float | None]) -> float:
    """Return the standard deviation (ddof 1) of the rewards that are not None, plus 1e-6; 1 if fewer than two."""
    scored = [r for r in rewards if r is not None]
    if len(scored) < 2:
        return 1.0
    mean = math.fsum(scored) / len(scored)
    return (math.fsum((r - mean) ** 2 for r in scored) / (len(scored) - 1)) ** 0.5 + 1e-6


def rewards_of_turns(sample: Sample, total: float, per_token: Floats | None = None) -> Floats:
    """Compute what each turn of an episode earned, [K]; together `total` and the rewards of its n trained tokens.

    total: what turn_rewards leave of it came with the last turn. per_token: [n], earned with the turn of each token.
    """
    earned = np.zeros(max(1, len(sample.spans)))
    if sample.turn_rewards:
        earned += sample.turn_rewards
    earned[-1] += total - math.fsum(sample.turn_rewards)
    if per_token is not None:
        np.add.at(earned, number_turns(sample), per_token)
    return earned


def number_turns(sample: Sample) -> NDArray[np.intp]:
    """Return the number of the turn of each trained token, [n]."""
    begins = [begin for begin, _ in sample.spans]
    return np.searchsorted(begins, np.flatnonzero(sample.loss_mask), side="right") - 1


def turn_advantages(
    returns: Sequence[Floats | None],
    *,
    scale: ScaleRewards = "none",
    leave_one_out: bool = False,
    batch_std: float = 1.0,
) -> list[Floats]:
    """Compute each turn's return above the group's, [G] arrays of [K_i] -> the same; as `group_advantages` otherwise.

    The return of an episode from turn k on is compared with the group's returns from turn k on; an episode that ended
    before counts with the return of its last turn. So a turn is compared with the same episodes, whatever it did, and
    with numbers on which it has no influence: the expected gradient stays what it is without a baseline. It would not,
    if each turn's reward were centred by the mean of its turn and then summed: an episode that goes on subtracts one
    mean more than one that stops.
    With rewards at the end alone, and no discount, the advantage of every turn is that of its episode.
    """
    scored = [r for r in returns if r is not None]
    if len(scored) < 2:
        return [np.zeros(1) if r is None else np.zeros(len(r)) for r in returns]
    table, n = hold_last(scored), len(scored)
    centred = np.where(table.max(0) == table.min(0), 0.0, table - table.mean(0))
    mean, std = float(table[:, 0].mean()), returns_std(scored)
    factor = choose_factor(scale, n=n, mean=mean, std=std, batch_std=batch_std, leave_one_out=leave_one_out)
    rows = iter(centred * factor)
    return [np.zeros(1) if r is None else next(rows)[: len(r)] for r in returns]


def hold_last(returns: Sequence[Floats]) -> Floats:
    """Lay the returns of episodes out as a table, [G, K]; the last one of an episode goes on to the table's end.

    >>> hold_last([np.array([3.0, 1.0]), np.array([2.0])])
    array([[3., 1.],
           [2., 2.]])
    """
    longest = max(map(len, returns))
    return np.stack([np.pad(r, (0, longest - len(r)), mode="edge") for r in returns])


def returns_std(returns: Sequence[Floats | None]) -> float:
    """Return one standard deviation for all turns (ddof 1, its square averaged over them), plus 1e-6.

    1 if fewer than two episodes have returns. With one turn per episode it is `reward_std`.
    """
    scored = [r for r in returns if r is not None]
    if len(scored) < 2:
        return 1.0
    return float(hold_last(scored).var(0, ddof=1).mean() ** 0.5) + 1e-6


def reward_to_go(rewards: Floats, gamma: float) -> Floats:
    """Compute G_t = r_t + gamma G_{t+1} over the trained tokens, or the turns, of one episode, [n] -> [n]."""
    return discount_backwards(rewards, gamma)


def generalised_advantages(
    rewards: Floats, values: Floats, *, gamma: float, lam: float, bootstrap: float = 0.0
) -> Floats:
    """Compute GAE over the trained tokens or the turns of an episode, [n] -> [n] (arxiv.org/abs/1506.02438, Eq. 16).

    values[t] is the value of the state before token t; `bootstrap` is that of the state after the last one, 0 where
    the episode ended. Other tokens in between are skipped: the next value is that of the next trained token.
    """
    r, v = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    following = np.append(v[1:], bootstrap) if len(v) else v
    return discount_backwards(r + gamma * following - v, gamma * lam)


def discount_backwards(values: Floats, factor: float) -> Floats:
    """Compute y_t = x_t + factor y_{t+1}, [n] -> [n].

    In log2(n) passes over the array instead of a step of Python per token: after each, y_t holds twice as many terms.
    """
    done = np.array(values, dtype=np.float64)
    if factor == 1:
        return np.cumsum(done[::-1])[::-1]
    reach, weight = 1, factor  # weight = factor ** reach
    while reach < len(done) and weight:
        done[:-reach] += weight * done[reach:]
        reach, weight = 2 * reach, weight * weight
    return done


def whiten(values: Sequence[Floats]) -> list[Floats]:
    """Compute (x - mean) / sqrt(var + 1e-8) over all numbers of all rows, with the variance of the population."""
    if not values or not (n := sum(map(len, values))):
        return [np.zeros(0) for _ in values]
    flat = np.concatenate(values, dtype=np.float64)
    centred = flat - sum_terms(flat) / n
    done = centred * (sum_terms(centred**2) / n + 1e-8) ** -0.5
    return np.split(done, np.cumsum([len(row) for row in values])[:-1])


def sum_terms(values: Floats) -> float:
    """Sum in extended precision and round once, so that the order of the samples hardly ever shows in a bit."""
    return float(np.sum(values, dtype=np.longdouble))


def overlong_penalty(tokens: int, *, max_tokens: int, buffer: int) -> float:
    """Return 0 up to max_tokens - buffer tokens, then down to -1 (https://arxiv.org/abs/2503.14476, Eq. 13)."""
    return max(-1.0, min(0.0, (max_tokens - buffer - tokens) / buffer))


def spread_over_sample(sample: Sample, values: float | Floats) -> Floats:
    """Return what is given for all trained tokens, or for each, laid out over the whole sample, [L]; 0 elsewhere."""
    spread = np.zeros(len(sample.token_ids), dtype=sample.float_dtype)
    spread[sample.loss_mask] = values
    return spread


def with_advantages(groups: list[Group], per_token: Sequence[float | Floats]) -> list[Group]:
    """Return the groups with advantages set; `per_token` has for each sample a number, or one per trained token."""
    rows = iter(per_token)
    return [[s.with_advantage(spread_over_sample(s, next(rows))) for s in g] for g in groups]
