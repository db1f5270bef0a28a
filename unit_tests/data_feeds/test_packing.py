"""The one shift, the one normalisation, and the cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_feeds.packing.batches import micro_batches, pack, plan_update, token_weights
from data_feeds.packing.bin_packing import estimate_cost, pack_into_bins
from unit_tests.helpers.examples import sample_of, some_groups

NORMS = ["token", "sequence", "sequence_sum", "constant", "prompt"]


def test_position_t_predicts_token_t_plus_one():
    s = sample_of([5, 6, 7, 8], [False, False, True, False], advantage=[0.0, 0.0, 2.0, 0.0])
    b = pack([s, s], [0.25, 0.5])
    assert b.input_ids.tolist() == [5, 6, 7, 5, 6, 7]
    assert b.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert b.segment_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert b.parents.tolist() == [-1, -1]
    assert b.at.tolist() == [1, 4], "position 1 (token 6) predicts token 7"
    assert b.labels.tolist() == [7, 7]
    assert b.tokens.weight.tolist() == [0.25, 0.5]
    assert b.tokens.advantage.tolist() == [2.0, 2.0]
    assert b.tokens.rollout_logp.tolist() == pytest.approx([0.2, 0.2])


def test_weights_are_shares_of_the_whole_update():
    one, three = sample_of([1, 2], [False, True]), sample_of([1, 2, 3, 4], [False, True, True, True])
    expected = {
        "token": [1 / 4, 1 / 4],
        "sequence": [1 / 2, 1 / 6],
        "sequence_sum": [1 / 2, 1 / 2],
        "constant": [1 / 20, 1 / 20],
        "prompt": [1 / 2, 1 / 6],
    }
    for norm, weights in expected.items():
        assert token_weights([[one], [three]], norm, horizon=10) == weights
    assert token_weights([[one, three]], "prompt", horizon=10) == [1 / 4, 1 / 4]


@pytest.mark.parametrize("norm", NORMS)
def test_a_failed_or_empty_sample_is_counted_in_no_denominator(norm):
    one = sample_of([1, 2], [False, True])
    failed = sample_of([1, 2, 3], [False, True, True], failure="ValueError: no")
    silent = sample_of([1, 2, 3], [False, False, False])
    assert token_weights([[one, failed], [silent]], norm, horizon=10)[0] == token_weights([[one]], norm, horizon=10)[0]
    assert token_weights([[one, failed], [silent]], norm, horizon=10)[1:] == [0.0, 0.0]


def test_some_with_credit_and_some_without_is_an_error():
    with pytest.raises(ValueError, match="all or none"):
        pack([sample_of([1, 2], [False, True]), sample_of([1, 2], [False, True], advantage=[0.0, 1.0])], [0.5, 0.5])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(50, 200), st.integers(1, 5), st.booleans())
def test_a_cut_keeps_sequences_once_within_the_budget_and_even_for_ranks(sizes, max_tokens, ranks, padded):
    bins = pack_into_bins(sizes, max_tokens, ranks=ranks, padded=padded)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert len(bins) % ranks == 0
    for b in bins:
        held = [sizes[i] for i in b]
        assert not held or (len(held) * max(held) if padded else sum(held)) <= max_tokens


def test_many_short_sequences_keep_to_a_small_budget():
    sizes = [1, 3, *[1] * 20, 2]
    bins = pack_into_bins(sizes, 4)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert sorted([sizes[i] for i in b] for b in bins) == [*[[1] * 4] * 5, [2, 1], [3]]


@given(st.lists(st.integers(1, 5000), min_size=12, max_size=60), st.integers(2, 4))
def test_ranks_get_work_of_about_the_same_cost(sizes, ranks):
    """The bound of dealing the longest first: no rank is ahead of another by more than one unit."""
    bins = pack_into_bins(sizes, sum(sizes), ranks=ranks, padded=False)
    assert len(bins) == ranks
    costs = [sum(estimate_cost(sizes[i]) for i in b) for b in bins]
    assert max(costs) - min(costs) <= estimate_cost(max(sizes)) + 1e-6


def test_a_long_sequence_counts_for_more_than_its_tokens():
    assert estimate_cost(12_288) == 2 * 12_288
    a, b = pack_into_bins([12_288, *[1024] * 16], 100_000, ranks=2, padded=False)
    # 12288 tokens cost 24576; 16 sequences of 1024 tokens cost 17749 together, and stay so
    assert sorted(map(len, (a, b))) == [1, 16]


def test_concurrent_micro_batches_are_alike_and_every_rank_has_as_many():
    sizes = [100, 90, 80, 70, 60, 50]
    bins = pack_into_bins(sizes, 100, ranks=2)  # padded: one sequence each
    assert [[sizes[i] for i in b] for b in bins] == [[100], [90], [70], [80], [50], [60]]
    # 100 + 70 = 90 + 80, but not their squares: rank 0 costs more so far, and gets the 50


def test_packed_bins_keep_to_the_budget_though_fewer_would_hold_the_sum():
    """18 tokens are two times ten, and no two of six fit into ten."""
    assert pack_into_bins([6, 6, 6], 10, padded=False) == [[0], [1], [2]]
    assert pack_into_bins([6, 6, 6], 10, padded=True) == [[0], [1], [2]]


def test_packed_bins_are_balanced_by_cost_and_not_by_tokens():
    """Keep the twelve of 1024 together: one sequence of 12288 tokens costs as much as 24576 short tokens."""
    long, *short = 12_288, *[1024] * 12
    bins = pack_into_bins([long, *short], 13_000, padded=False)
    assert sorted(map(len, bins)) == [1, 12]
    more = pack_into_bins([long, *short, *short[:2]], 15_000, padded=False)
    assert sorted(map(len, more)) == [1, 14], "two would still have room beside the long one"


def test_packed_rows_hold_no_padding_and_padded_ones_say_how_much():
    groups = [[sample_of([1] * n, [False] + [True] * (n - 1))] for n in (11, 6, 3)]  # 10, 5, 2 tokens
    assert plan_update(groups, "token", 100, padded=False).padding == 0
    assert plan_update(groups, "token", 100, padded=True).padding == pytest.approx(1 - 17 / 30)
    assert plan_update(groups, "token", 10, padded=True).padding == pytest.approx(1 - 17 / 20)


def test_a_sequence_longer_than_the_budget_names_the_key():
    with pytest.raises(ValueError, match=r"trainer\.micro_batch_tokens=10"):
        pack_into_bins([11], 10)


def test_a_rank_with_nothing_to_do_gets_a_batch_that_teaches_nothing():
    [[full], [idle]] = micro_batches(some_groups(1, 1), "token", 1000, ranks=2)
    assert full.tokens.weight.sum() == pytest.approx(1.0)
    assert len(idle.input_ids) > 0 and idle.labels.shape == (0,) and idle.tokens.weight.shape == (0,)


@pytest.mark.parametrize("norm", ["token", "sequence", "prompt"])
def test_weights_of_an_update_add_up_to_one_however_it_is_cut(norm):
    cut_up = micro_batches(some_groups(), norm, 60, ranks=3)
    assert sum(float(b.tokens.weight.sum()) for rank in cut_up for b in rank) == pytest.approx(1)


def test_counts_stay_exact_in_any_dtype():
    n = 70_001
    one = sample_of([1] * n, [False] + [True] * (n - 1))
    [w] = token_weights([[one]], "token", horizon=1)
    assert w == 1 / 70_000
    assert pack([one], [w], dtype=torch.float64).tokens.weight.sum().item() == pytest.approx(1, abs=1e-12)
