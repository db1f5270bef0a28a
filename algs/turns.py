"""Credit along an episode: rewards and returns of turns or tokens, and advantages of turns.

All computation is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from algs.credit import ScaleRewards, choose_factor
from core.types.arrays import Floats
from core.types.samples import TOKEN_REWARDS, Sample


def rewards_of_turns(sample: Sample, total: float, per_token: Floats | None = None) -> Floats:
    """Compute the reward of each turn of an episode, [K]: the parts of `total`, and of the rewards of n trained tokens.

    total: the last turn earns the rest after turn_rewards and the column token_rewards. per_token: [n], added to the
    turn of each token.
    """
    earned = np.zeros(max(1, len(sample.spans)))
    if sample.turn_rewards:
        earned += sample.turn_rewards
    earned[-1] += total - math.fsum(sample.turn_rewards)
    if (shares := read_token_rewards(sample)) is not None:
        np.add.at(earned, number_turns(sample), shares)
        earned[-1] -= math.fsum(shares)
    if per_token is not None:
        # add.at and not +=, which would count a turn with several tokens once
        np.add.at(earned, number_turns(sample), per_token)
    return earned


def rewards_of_tokens(sample: Sample, total: float) -> Floats:
    """Compute the reward of each trained token, [n]: the share in the column token_rewards, and the last one the rest.

    total: reward of the sample. Without the column, the last token earns all: a reward is known after it.
    """
    earned = np.zeros(sample.n_trained)
    if (shares := read_token_rewards(sample)) is not None:
        earned += shares
        total -= math.fsum(shares)
    earned[-1:] += total
    return earned


def read_token_rewards(sample: Sample) -> Floats | None:
    """Return the shares of the reward that the trained tokens earned, [n] float64; None without the column."""
    shares = sample.columns.get(TOKEN_REWARDS)
    return None if shares is None else shares[sample.loss_mask].astype(np.float64)


def number_turns(sample: Sample) -> NDArray[np.intp]:
    """Return the turn's number of each trained token, [n]."""
    begins = [begin for begin, _ in sample.spans]
    return np.searchsorted(begins, np.flatnonzero(sample.loss_mask), side="right") - 1


def spread_turns(samples: Sequence[Sample], advantages: Sequence[Floats]) -> list[Floats]:
    """Return the advantage of each trained token's turn, [n] of each sample; 0 for a sample outside the statistics."""
    pairs = zip(samples, advantages, strict=True)
    return [a[number_turns(s)] if len(a) > 1 else np.broadcast_to(a, s.n_trained) for s, a in pairs]


def turn_advantages(
    returns: Sequence[Floats | None],
    *,
    scale: ScaleRewards = "none",
    leave_one_out: bool = False,
    batch_std: float = 1.0,
) -> list[Floats]:
    """Compute each turn's return minus the group's mean, [G] arrays of [K_i] -> the same; scaled as in
    `group_advantages`.

    The return of an episode from turn k on is compared with the group's returns from turn k on. An episode that ended
    before counts with the return of its last turn. So a turn is always compared with the same episodes, by numbers that
    it does not influence: the baseline leaves the expected gradient unchanged. Centring each turn's reward by the
    turn's mean before summing would not: an episode that continues would subtract more means than an episode that
    stops. With a reward only at the end, and no discount, every turn has the advantage of the episode.
    """
    scored = [r for r in returns if r is not None]
    if len(scored) < 2:
        return [np.zeros(1) if r is None else np.zeros(len(r)) for r in returns]
    table, n = hold_last(scored), len(scored)
    # Equal returns give exactly 0, as in group_advantages, not the rounding error of the mean.
    centred = np.where(table.max(0) == table.min(0), 0.0, table - table.mean(0))
    # The return from the first turn on is the episode's: with a reward only at the end, the factor is that of episodes.
    mean, std = float(table[:, 0].mean()), returns_std(scored)
    factor = choose_factor(scale, n=n, mean=mean, std=std, batch_std=batch_std, leave_one_out=leave_one_out)
    rows = iter(centred * factor)
    return [np.zeros(1) if r is None else next(rows)[: len(r)] for r in returns]


def hold_last(returns: Sequence[Floats]) -> Floats:
    """Arrange the returns of episodes as a table, [G, K]; each episode's last return is repeated to the end.

    >>> hold_last([np.array([3.0, 1.0]), np.array([2.0])])
    array([[3., 1.],
           [2., 2.]])
    """
    longest = max(map(len, returns))
    return np.stack([np.pad(r, (0, longest - len(r)), mode="edge") for r in returns])


def returns_std(returns: Sequence[Floats | None]) -> float:
    """Return a common standard deviation for all turns (ddof 1, variance averaged over turns), plus 1e-6.

    It is 1 for fewer than two episodes with returns. With a turn per episode it is `reward_std`.
    """
    scored = [r for r in returns if r is not None]
    if len(scored) < 2:
        return 1.0
    return float(hold_last(scored).var(0, ddof=1).mean() ** 0.5) + 1e-6


def generalised_advantages(
    rewards: Floats, values: Floats, *, gamma: float, lam: float, bootstrap: float = 0.0
) -> Floats:
    """Compute GAE over the trained tokens or turns of an episode, [n] -> [n] (arxiv.org/abs/1506.02438, Eq. 16).

    values[t] is the value of the state before token t; `bootstrap` is the value after the last token, 0 if the episode
    ended. Untrained tokens in between are skipped: the next value is that of the next trained token.
    """
    r, v = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    following = np.append(v[1:], bootstrap) if len(v) else v
    return reward_to_go(r + gamma * following - v, gamma * lam)


def reward_to_go(rewards: Floats, gamma: float) -> Floats:
    """Compute G_t = r_t + gamma G_{t+1} over the trained tokens, or the turns, of an episode, [n] -> [n].

    It takes log2(n) array operations, not a Python step per token.
    """
    done = np.array(rewards, dtype=np.float64)
    if gamma == 1:
        return np.cumsum(done[::-1])[::-1]
    reach, weight = 1, gamma  # weight = gamma ** reach
    # After each pass G_t sums twice as many terms: reach of them, with weights 1, gamma, gamma^2, ...
    # a weight that has underflown to 0 adds nothing more
    while reach < len(done) and weight:
        done[:-reach] += weight * done[reach:]
        reach, weight = 2 * reach, weight * weight
    return done
