"""Credit along episodes by hand: turns of unequal number, demonstrations, scales, cut episodes, and turns left out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from algs.base import Algorithm
from algs.chord import CHORD
from algs.credit import choose_factor, spread_over_sample, sum_terms, whiten, whiten_tokens
from algs.grpo import GRPO
from algs.luffy import LUFFY
from algs.ppo import PPO
from algs.reinforce_pp import ReinforcePP
from algs.rloo import RLOO
from algs.terms import KL
from algs.turns import (
    generalised_advantages,
    hold_last,
    number_turns,
    returns_std,
    reward_to_go,
    rewards_of_tokens,
    rewards_of_turns,
    spread_turns,
    turn_advantages,
)
from core.types.arrays import DOUBLE
from core.types.samples import Group, Sample
from unit_tests.helpers.examples import sample_of

MASK = [False, True, False, True, True, False, True]
"""Turns of one, two and one tokens."""


def episode(reward: float | None, *earned: float, mask: list[bool] = MASK, **more: Any) -> Sample:
    """Episode of the mask's turns; without a reward it has failed."""
    ids = [*range(10, 10 + len(mask))]
    sample = sample_of(ids, mask, reward=reward, turn_rewards=[*earned], dtype=DOUBLE, **more)
    return replace(sample, failure="timeout") if reward is None else sample


def shown(reward: float, *earned: float, mask: list[bool] = MASK) -> Sample:
    n = len(mask)
    return episode(reward, *earned, mask=mask, origin="demonstration", rollout_logp=[0.0] * n, versions=[-1] * n)


def credit(alg: Algorithm, *groups: Group) -> list[list[float]]:
    """Advantages of the trained tokens, by sample."""
    found = alg.compute_advantages([*groups])
    return [s.advantage[s.loss_mask].tolist() for g in found for s in g if s.advantage is not None]


def close(rows: list[list[float]]) -> list[Any]:
    return [pytest.approx(row, abs=1e-12) for row in rows]


def test_tokens_have_the_number_of_their_turn():
    assert number_turns(episode(1.0)).tolist() == [0, 1, 1, 2]
    left_out = replace(episode(1.0), excluded=np.array([False, True, False, False, True, False, False]))
    assert number_turns(left_out).tolist() == [1, 2]
    assert number_turns(episode(None)).tolist() == []


@pytest.mark.parametrize(
    ("sample", "per_token", "want"),
    [
        (episode(5.0), None, [0, 0, 5]),
        (episode(5.0, 1.0, 2.0, 0.5), None, [1, 2, 2]),
        (episode(5.0), np.array([0.1, 0.2, 0.4, 0.8]), [0.1, 0.6, 5.8]),
        (episode(5.0, columns={"token_rewards": [9, 1, 9, 2, 4, 9, 0]}), None, [1, 6, -2]),
        (episode(5.0, 1.0, 0.0, 0.0, columns={"token_rewards": [9, 1, 9, 2, 4, 9, 0]}), None, [2, 6, -3]),
        (episode(5.0, mask=[False, False]), None, [5]),
    ],
)
def test_the_last_turn_earns_what_is_left(sample, per_token, want):
    assert rewards_of_turns(sample, 5.0, per_token).tolist() == pytest.approx(want)


def test_the_last_token_earns_what_is_left():
    assert rewards_of_tokens(episode(5.0), 5.0).tolist() == [0, 0, 0, 5]
    shares = episode(5.0, columns={"token_rewards": [9, 1, 9, 2, 4, 9, 0.5]})
    assert rewards_of_tokens(shares, 5.0).tolist() == [1, 2, 4, -2]
    assert rewards_of_tokens(episode(None), 5.0).tolist() == []


def test_returns_of_an_episode_that_ended_go_on_as_its_last():
    returns = [np.array([3.0, 1.0, 2.0]), np.array([5.0]), np.array([4.0, 6.0])]
    assert hold_last(returns).tolist() == [[3, 1, 2], [5, 5, 5], [4, 6, 6]]
    variances = [1.0, 7.0, 39 / 9]
    assert returns_std([*returns, None]) == pytest.approx(math.sqrt(sum(variances) / 3) + 1e-6, rel=1e-12)
    assert [row.tolist() for row in turn_advantages([returns[0], None, *returns[1:]])] == [
        [-1, -3, pytest.approx(-7 / 3)],
        [0],
        [1],
        [0, 2],
    ]
    assert [row.tolist() for row in turn_advantages([None, returns[0]])] == [[0], [0, 0, 0]]
    equal = [np.array([0.1, 1.0]), np.array([0.1, 2.0]), np.array([0.1, 3.0])]
    assert [row.tolist() for row in turn_advantages(equal)] == [[0, -1], [0, 0], [0, 1]]


SCALED: list[tuple[dict[str, Any], float]] = [
    ({}, 1.0),
    ({"scale": "mean"}, 1 / 4),
    ({"scale": "batch", "batch_std": 5.0}, 1 / 5),
    ({"scale": "group"}, 1 / (math.sqrt((2 + 8) / 2) + 1e-6)),
    ({"leave_one_out": True}, 2.0),
    ({"scale": "mean", "leave_one_out": True}, 1 / 2),
]


@pytest.mark.parametrize(("how", "factor"), SCALED)
def test_turns_are_scaled_like_episodes(how: dict[str, Any], factor: float):
    """The mean reward is that of the first turns, 4; variances of the turns are 2 and 8."""
    found = turn_advantages([np.array([3.0, 1.0]), np.array([5.0, 5.0])], **how)
    assert [row.tolist() for row in found] == close([[-factor, -2 * factor], [factor, 2 * factor]])


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, [[-1, -2], [1, 2]]),
        ({"scale_rewards": "mean"}, [[-1 / 4, -1 / 2], [1 / 4, 1 / 2]]),
        ({"leave_one_out": True}, [[-2, -4], [2, 4]]),
        ({"turn_discount": 0.5}, [[-0.5, -2], [0.5, 2]]),
    ],
)
def test_settings_of_turns_reach_the_advantages(settings, want):
    """Two turns of one token: returns (3, 1) and (5, 5); with a discount of 1/2, (2.5, 1) and (3.5, 5)."""
    mask = [False, True, False, True]
    group = [episode(3.0, 2.0, 0.0, mask=mask), episode(5.0, 0.0, 0.0, mask=mask)]
    if settings.get("turn_discount"):
        group[1] = episode(6.0, 1.0, 0.0, mask=mask)
    assert credit(GRPO(credit="turn", **settings), group) == close(want)


def test_turns_of_a_step_share_a_deviation():
    mask = [False, True, False, True]
    groups = [[episode(r, r, 0.0, mask=mask) for r in row] for row in ((1.0, 3.0), (2.0, 8.0))]
    std = math.sqrt((29 / 3) / 2) + 1e-6  # of 1, 3, 2, 8; the second turns earn nothing
    got = credit(GRPO(credit="turn", scale_rewards="batch"), *groups)
    assert got == close([[-1 / std, 0], [1 / std, 0], [-3 / std, 0], [3 / std, 0]])
    alone = credit(GRPO(credit="turn", scale_rewards="group"), groups[0])
    assert alone == close([[-1 / (1 + 1e-6), 0], [1 / (1 + 1e-6), 0]])


def test_a_demonstration_counts_in_no_baseline_of_turns():
    group = [episode(3.0, 2.0, 0.0, 0.0), episode(5.0, 4.0, 0.0, 0.0), shown(9.0, 1.0, 1.0, 1.0)]
    got = credit(CHORD(credit="turn"), group)
    assert got == close([[-1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert CHORD(credit="turn", dynamic_sampling=True).accept_group(group)
    equal = [episode(3.0, 2.0, 0.0, 0.0), episode(3.0, 2.0, 0.0, 0.0), shown(9.0, 1.0, 1.0, 1.0)]
    for credit_of in ("turn", "episode"):
        alg = CHORD(credit=credit_of, dynamic_sampling=True)
        assert not alg.accept_group(equal), "the demonstration alone is different"
    assert LUFFY(dynamic_sampling=True).accept_group(equal), "it counts there"


def test_a_demonstration_counts_in_no_deviation_of_the_step():
    group = [episode(1.0), episode(5.0), shown(30.0)]
    std = math.sqrt(8) + 1e-6
    got = credit(CHORD(scale_rewards="batch"), group)
    assert got == close([[-2 / std] * 4, [2 / std] * 4, [27 / std] * 4])
    assert credit(CHORD(leave_one_out=True), group) == close([[-4] * 4, [4] * 4, [27] * 4])
    assert credit(LUFFY(), group) == close([[-11] * 4, [-7] * 4, [18] * 4])
    [low, high, other] = credit(CHORD(whiten=True), group)
    assert (low, high, other) == (pytest.approx([-1] * 4), pytest.approx([1] * 4), [0] * 4)
    assert credit(RLOO(), [episode(1.0), episode(5.0), episode(None)]) == close([[-4] * 4, [4] * 4, []])


def test_values_are_whitened_over_those_that_count():
    samples = [episode(1.0), episode(1.0), episode(1.0, mask=[False, True])]
    got = whiten_tokens(samples, [2.0, np.array([9.0, 9.0, 9.0, 9.0]), 7.0], [True, False, True])
    # 2 four times and 7 once: mean 3, variance 4
    assert [row.tolist() for row in got] == [pytest.approx([-0.5] * 4), [0] * 4, pytest.approx([2])]
    assert [row.tolist() for row in whiten([np.array([1.0, 1.0])])] == [[0, 0]]
    assert [len(row) for row in whiten([np.zeros(2), np.zeros(0), np.zeros(3)])] == [2, 0, 3]


def test_sums_of_terms_keep_what_is_small():
    assert sum_terms(np.array([1e16, 1.0, -1e16])) == 1.0
    assert reward_to_go(np.array([1.0, 1e16, -1e16]), 1.0).tolist() == [1.0, 0.0, -1e16]


@pytest.mark.parametrize(
    ("gamma", "want"),
    [
        (0.0, [2.0, 3.0, 5.0, 7.0, 11.0]),
        (0.5, [2 + 1.5 + 1.25 + 0.875 + 0.6875, 3 + 2.5 + 1.75 + 1.375, 5 + 3.5 + 2.75, 7 + 5.5, 11.0]),
        (1.0, [28.0, 26.0, 23.0, 18.0, 11.0]),
    ],
)
def test_returns_add_what_comes_later_with_a_discount(gamma: float, want: list[float]):
    assert reward_to_go(np.array([2.0, 3.0, 5.0, 7.0, 11.0]), gamma).tolist() == pytest.approx(want)
    assert [reward_to_go(np.array(own), gamma).tolist() for own in ([], [4.0])] == [[], [4.0]]


def test_returns_of_whole_numbers_and_of_float32_are_computed_in_float64():
    for given in ([1, 0, 2], np.array([1, 0, 2]), np.array([1, 0, 2], dtype=np.float32)):
        found = reward_to_go(given, 0.1)  # type: ignore[arg-type]
        assert found.dtype == np.float64 and found.tolist() == pytest.approx([1.02, 0.2, 2.0], rel=1e-15)
        assert reward_to_go(given, 1.0).tolist() == [3.0, 2.0, 2.0]  # type: ignore[arg-type]


def test_advantages_of_tokens_look_at_the_next_value():
    rewards, values = np.array([1.0, 0.0, 2.0]), np.array([0.5, 0.25, 4.0])
    got = generalised_advantages(rewards, values, gamma=0.5, lam=0.0, bootstrap=8.0)
    assert got.tolist() == pytest.approx([1 + 0.125 - 0.5, 2 - 0.25, 2 + 4 - 4])
    got = generalised_advantages(rewards, values, gamma=0.5, lam=0.5)
    last = 2 - 4
    assert got.tolist() == pytest.approx([0.625 + 0.25 * (1.75 + 0.25 * last), 1.75 + 0.25 * last, last])
    assert generalised_advantages(np.zeros(0), np.zeros(0), gamma=0.5, lam=0.5, bootstrap=3.0).tolist() == []


def test_advantages_of_turns_are_laid_out_over_their_tokens():
    one, failed = episode(1.0), episode(None)
    got = spread_turns([one, failed, one], [np.array([2.0, 3.0, 5.0]), np.zeros(1), np.zeros(1)])
    assert [row.tolist() for row in got] == [[2, 3, 3, 5], [], [0, 0, 0, 0]]
    assert spread_over_sample(one, np.array([2.0, 3.0, 4.0, 5.0])).tolist() == [0, 2, 0, 3, 4, 0, 5]
    assert spread_over_sample(one, 6.0).tolist() == [0, 6, 0, 6, 6, 0, 6]
    factors = [choose_factor("mean", n=3, mean=m, std=1.0, batch_std=1.0, leave_one_out=False) for m in (0.0, 2.0)]
    assert factors == [0.0, 0.5]


VALUES = {"values": [9.0, 0.5, 9.0, 0.25, 7.0, 9.0, 0.125]}
TURN = PPO(credit="turn", whiten=False, lam=0.0)


def test_a_turn_has_the_value_before_its_first_token():
    """Turn rewards 1, 2 and -1; values 0.5, 0.25 and 0.125."""
    sample = episode(2.0, 1.0, 2.0, 0.0, columns=VALUES)
    first, second, third = 1 + 0.25 - 0.5, 2 + 0.125 - 0.25, -1 - 0.125
    [[done]] = TURN.compute_advantages([[sample]])
    assert done.advantage is not None
    assert done.advantage.tolist() == [0, *(pytest.approx(x) for x in (first, 0, second, second, 0, third))]
    values = [0.5, 0, 0.25, 0.25, 0, 0.125]
    returns = [a + v for a, v in zip(done.advantage[1:].tolist(), values, strict=True)]
    assert done.columns["returns"].tolist() == [0, *(pytest.approx(x) for x in returns)]
    discounted = credit(PPO(credit="turn", whiten=False, lam=0.0, turn_discount=0.5), [sample])
    assert discounted == close([[1 + 0.125 - 0.5, *[2 + 0.0625 - 0.25] * 2, third]])
    failed = episode(None, columns=VALUES)
    assert credit(TURN, [failed]) == [[]] and credit(PPO(whiten=False), [failed]) == [[]]


def test_a_turn_that_nothing_predicts_gives_its_reward_to_the_next():
    """The first token is a turn of its own; rewards 1, 2 and -1."""
    mask = [True, False, True, False, True, True]
    sample = episode(2.0, 1.0, 2.0, 0.0, mask=mask, columns={"values": [9.0, 9.0, 0.5, 9.0, 0.25, 7.0]})
    assert credit(TURN, [sample]) == close([[1 + 2 + 0.25 - 0.5, *[-1 - 0.25] * 2]])


def test_a_cut_episode_takes_the_value_at_the_cut_for_its_last_turn():
    """The last token is left out; its value 0.125 is added to what the turns before it earned, 2 and -1 together."""
    cut = episode(2.0, 1.0, 2.0, 0.0, columns=VALUES, stop="length")
    alg = PPO(credit="turn", whiten=False, lam=0.0, bootstrap_truncated=True)
    assert credit(alg, [cut]) == close([[1 + 0.25 - 0.5, *[2 - 1 + 0.125 - 0.25] * 2]])
    by_token = PPO(whiten=False, lam=0.0, bootstrap_truncated=True)
    assert credit(by_token, [cut]) == close([[0.25 - 0.5, 7 - 0.25, 2 + 0.125 - 7]])
    ended = replace(cut, stop="eos")
    assert credit(by_token, [ended]) == close([[0.25 - 0.5, 7 - 0.25, 0.125 - 7, 2 - 0.125]])


def test_the_kl_in_the_reward_is_earned_at_its_tokens():
    """Log-ratios to the reference 1, 0, 2 and -1, at half their size."""
    columns = VALUES | {"prox_logp": [9.0, -1, 9, -1, -1, 9, -2], "ref_logp": [9.0, -2, 9, -1, -3, 9, -1]}
    sample = episode(2.0, columns=columns | {"values": [0.0] * 7})
    kl = KL(coef=0.5, place="reward")
    assert credit(PPO(whiten=False, lam=0.0, kl=kl), [sample]) == close([[-0.5, 0, -1, 2.5]])
    assert credit(PPO(credit="turn", whiten=False, lam=0.0, kl=kl), [sample]) == close([[-0.5, -1, -1, 2.5]])
    assert GRPO(kl=kl).penalised_reward(sample) == 2 - 1
    [got] = credit(ReinforcePP(kl=kl, gamma=0.5), [sample])
    returns = np.array([-0.5 - 0.25 + 0.3125, -0.5 + 0.625, -1 + 1.25, 2.5])
    assert got == pytest.approx(((returns - returns.mean()) / returns.std()).tolist(), rel=1e-6)
