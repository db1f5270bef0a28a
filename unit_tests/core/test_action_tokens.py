"""Numbers become bins and bins tokens, and back."""

import numpy as np
import pytest

from core.types.action_tokens import (
    NotActions,
    find_bins,
    find_centres,
    list_action_tokens,
    read_action_tokens,
    write_action_tokens,
)

LOW, HIGH = np.array([-1.0, 0.0, 5.0]), np.array([1.0, 10.0, 5.5])


@pytest.mark.parametrize("n", [1, 2, 7, 256])
def test_a_bin_comes_back_and_a_value_moves_by_half_a_bin_at_most(n):
    rng = np.random.default_rng(n)
    for _ in range(100):
        bins = rng.integers(0, n, 3).tolist()
        centres = find_centres(bins, LOW, HIGH, n)
        assert find_bins(centres, LOW, HIGH, n) == bins
        assert read_action_tokens(write_action_tokens(bins)) == bins
        values = rng.uniform(LOW, HIGH)
        moved = np.abs(find_centres(find_bins(values, LOW, HIGH, n), LOW, HIGH, n) - values)
        assert (moved <= (HIGH - LOW) / n / 2 + 1e-12).all()


def test_borders_belong_to_the_bin_above_and_outside_values_to_the_nearest():
    assert find_bins([0.0, 0.25, 0.5, 0.75, 1.0], 0.0, 1.0, 4) == [0, 1, 2, 3, 3]
    assert find_bins([-9.0, 9.0, np.inf, -np.inf], 0.0, 1.0, 4) == [0, 3, 3, 0]
    assert find_centres([0, 1, 2, 3], 0.0, 1.0, 4).tolist() == [0.125, 0.375, 0.625, 0.875]


def test_tokens_are_all_different_and_nothing_else_is_read():
    tokens = list_action_tokens(300)
    assert len({*tokens}) == 300 and read_action_tokens("".join(tokens)) == list(range(300))
    assert read_action_tokens("") == []
    for wrong in ("<act_>", "<act_01>", "<act_-1>", "<act_1", "act_1", "<act_1> and <act_2>", "<act_9999999999>"):
        with pytest.raises(NotActions, match="is no action token"):
            read_action_tokens(wrong)
