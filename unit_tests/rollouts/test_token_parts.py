"""Rewards of tokens: which token earns which share, and shares that do not fit a sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types.samples import TOKEN_REWARDS
from rewards.scored import RewardResult, Steps
from rollouts.token_parts import add_token_rewards, find_positions, find_step_ends, find_token, join_turns
from unit_tests.helpers.examples import sample_of

WORDS = ["<p>", "one", "\n\n", "two", " three", "\n\n\n\n", "x"]
SEVERAL_TURNS = sample_of([0, 6, 3, 0, 1, 2, 3, 4, 5], [False, True, True, False, True, True, True, True, True])
"""Two replies: "xtwo" at 1 and 2; and "one", blank line, "two three", blank lines at 4 to 8."""


def decode(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), [(1, 1.0), (2, 2.0), (4, 3.0), (5, 4.0), (6, 5.0), (7, 6.0), (8, 7.0)]),
        (Steps("\n\n", [0.5, -1.0]), [(4, 0.5), (7, -1.0)]),
        (Steps(" ", [2.0, 3.0]), [(6, 2.0), (7, 3.0)]),
        (Steps("absent", [9.0]), [(7, 9.0)]),
    ],
)
def test_a_value_belongs_to_its_sampled_token_or_to_the_end_of_its_step(values, expected):
    assert find_positions(SEVERAL_TURNS, "p", values, decode) == expected


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((1.0,) * 6, "token_parts['p'] has 6 values for 7 sampled tokens"),
        ((1.0,) * 9, "token_parts['p'] has 9 values for 7 sampled tokens"),
        (Steps("\n\n", [1.0]), "token_parts['p'] has 1 values for 2 steps of the last reply"),
        (Steps("\n\n", [1.0] * 3), "token_parts['p'] has 3 values for 2 steps of the last reply"),
    ],
)
def test_a_wrong_number_of_values_is_refused(values, said):
    with pytest.raises(ValueError) as refused:
        find_positions(SEVERAL_TURNS, "p", values, decode)
    assert str(refused.value) == said


def test_token_rewards_are_the_weighted_sum_of_all_parts_with_a_weight():
    parts = {
        "each": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
        "steps": Steps("\n\n", [10.0, 20.0]),
        "metric": (100.0,) * 7,
    }
    sample = sample_of(
        SEVERAL_TURNS.token_ids.tolist(), SEVERAL_TURNS.action_mask.tolist(), columns={"kept": np.zeros(9, "f4")}
    )
    found = add_token_rewards(sample, RewardResult(token_parts=parts), {"each": 2.0, "steps": -0.5}, decode)
    column = found.columns[TOKEN_REWARDS]
    assert column.tolist() == [0.0, 2.0, 4.0, 0.0, 1.0, 8.0, 10.0, 2.0, 14.0]
    assert column.dtype == sample.float_dtype and not column.flags.writeable
    assert set(found.columns) == {"kept", TOKEN_REWARDS} and set(sample.columns) == {"kept"}
    assert add_token_rewards(sample, RewardResult(), {"each": 2.0}, decode) is sample


@pytest.mark.parametrize(
    ("of_env", "of_reward", "joined"),
    [
        ([], [], []),
        ([{"a": 1.0}], [], [{"a": 1.0}]),
        ([], [{"b": 1.0}, {"b": 2.0}], [{"b": 1.0}, {"b": 2.0}]),
        ([{"a": 1.0}, {"b": 5.0}], [{"b": 2.0}, {"b": 3.0}], [{"a": 1.0, "b": 2.0}, {"b": 3.0}]),
    ],
)
def test_turns_have_the_shares_of_environment_and_reward(of_env, of_reward, joined):
    assert join_turns(SEVERAL_TURNS, of_env, of_reward) == joined


@pytest.mark.parametrize("n", [1, 3])
def test_a_reward_with_a_wrong_number_of_turns_is_refused(n):
    with pytest.raises(ValueError) as refused:
        join_turns(SEVERAL_TURNS, [{"a": 1.0}] * 2, [{"b": 1.0}] * n)
    assert str(refused.value) == f"turn_parts has {n} entries for 2 replies"


@given(
    st.lists(st.sampled_from(["a", " ", "\n", "bc"]), max_size=12).map("".join), st.sampled_from(["\n", "\n\n", "a"])
)
def test_a_step_ends_after_its_last_visible_character(text, separator):
    begins, at = [], 0
    for step in text.split(separator):
        begins.append((at, step))
        at = at + len(step) + len(separator)
    plain = [
        max(i + 1 for i in range(begin, begin + len(step)) if not text[i].isspace())
        for begin, step in begins
        if not step.isspace() and step
    ]
    assert find_step_ends(text, separator) == plain


@given(st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=12), st.data())
def test_the_token_of_a_character_is_the_first_whose_text_has_it(ids, data):
    at = data.draw(st.integers(1, len(decode(ids))))
    assert find_token(ids, at, decode) == next(n for n in range(len(ids)) if len(decode(ids[: n + 1])) >= at)


@pytest.mark.parametrize(
    ("ids", "characters", "token"),
    [([0], 1, 0), ([0], 3, 0), ([0], 9, 0), ([1, 3], 3, 0), ([1, 3], 4, 1), ([1, 3, 6], 7, 2), ([1, 3, 6], 99, 2)],
)
def test_more_characters_than_there_are_belong_to_the_last_token(ids, characters, token):
    """The tokens 0, 1, 3 and 6 have 3, 3, 3 and 1 characters. No more tokens are decoded than there are."""
    decoded: list[int] = []

    def count(some: list[int]) -> str:
        decoded.append(len(some))
        return decode(some)

    assert find_token(ids, characters, count) == token
    assert max(decoded, default=0) < max(2, len(ids))
