"""What sequences share is laid once, found from their token ids; and the cut that counts it once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import RunStopped
from core.types.samples import Batch
from data_feeds.packing.batches import micro_batches, pack, plan_update
from data_feeds.packing.bin_packing import estimate_cost
from data_feeds.packing.prefix_tree import lay_out_row, sort_by_prefix
from unit_tests.helpers.examples import families, sample_of, shared_of, siblings, some_groups

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def read_up_to(batch: Batch, at: int) -> list[int]:
    """The tokens that position `at` may attend to, in order, as the segments say."""
    segment = int(batch.segment_ids[at])
    seen = (batch.segment_ids == segment).nonzero()[:, 0]
    tokens = batch.input_ids[seen[seen <= at]].tolist()
    while (segment := int(batch.parents[segment])) >= 0:
        tokens = batch.input_ids[batch.segment_ids == segment].tolist() + tokens
    return tokens


def count_different(sequences: list[list[int]]) -> int:
    return len({tuple(s[: t + 1]) for s in sequences for t in range(len(s))})


@given(SEQUENCES, st.integers(1, 3))
def test_every_sequence_is_read_back_and_every_beginning_is_laid_once(sequences, n_families):
    kin = [i % n_families for i in range(len(sequences))]
    row = lay_out_row(sequences, kin)
    assert [row.input_ids[place].tolist() for place in row.places] == sequences
    assert [row.position_ids[place].tolist() for place in row.places] == [list(range(len(s))) for s in sequences]
    of_family = [[s for s, k in zip(sequences, kin, strict=True) if k == family] for family in set(kin)]
    assert len(row.input_ids) == sum(map(count_different, of_family))
    assert all(parent < i for i, parent in enumerate(row.parents)), "parents come first"
    assert (np.diff(row.segment_ids) >= 0).all() and set(row.segment_ids.tolist()) == set(range(len(row.parents)))


@given(SEQUENCES)
def test_neighbours_in_order_tell_how_many_tokens_are_different(sequences):
    ids = [np.array(s) for s in sequences]
    order, shared = sort_by_prefix(ids)
    assert sorted(order) == list(range(len(ids)))
    assert sum(map(len, sequences)) - sum(shared) == count_different(sequences)


def test_without_families_the_row_is_sequence_by_sequence():
    row = lay_out_row([[1, 2, 3], [1, 2], [1, 2, 3]])
    assert row.input_ids.tolist() == [1, 2, 3, 1, 2, 1, 2, 3] and row.parents.tolist() == [-1, -1, -1]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert row.segment_ids.tolist() == [0] * 3 + [1] * 2 + [2] * 3


def test_nothing_is_shared_between_families():
    assert lay_out_row([[1, 2, 3], [1, 2, 4]], ["a", "b"]).parents.tolist() == [-1, -1]
    assert lay_out_row([[1, 2, 3], [1, 2, 4]], ["a", "a"]).parents.tolist() == [-1, 0, 0]


def test_the_first_token_of_every_reply_is_trained_on():
    """The last token of the prompt stands once in the row, and predicts as many tokens as there are replies."""
    ask, mask = [5, 6, 7], [False] * 3
    group = [sample_of([*ask, *reply], mask + [True] * len(reply)) for reply in ([8, 9], [10], [11, 12, 13])]
    batch = pack(group, [1.0] * 3, families=[0, 0, 0])
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 11, 12]
    assert batch.at.tolist() == [2, 3, 2, 2, 4, 5]
    assert batch.labels.tolist() == [8, 9, 10, 11, 12, 13]
    assert batch.tokens.seq_ids.tolist() == [0, 0, 1, 2, 2, 2], "numbers of the samples, not of the segments"


@pytest.mark.parametrize("max_tokens", [40, 70, 10_000])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_trained_token_is_predicted_from_all_that_is_before_it(max_tokens, ranks):
    groups = families()
    plan = plan_update(groups, "sequence", max_tokens, ranks=ranks, padded=False, share_prefixes=True)
    met = []
    for of_rank, bins in zip(plan.batches(), plan.bins, strict=True):
        for batch, chosen in zip(of_rank, bins, strict=True):
            assert len(batch.input_ids) <= max_tokens and len(batch.at) <= max_tokens
            expected = [(plan.samples[i], t) for i in chosen for t, yes in enumerate(plan.samples[i].loss_mask) if yes]
            assert len(expected) == len(batch.at)
            for (s, t), at, label in zip(expected, batch.at.tolist(), batch.labels.tolist(), strict=True):
                assert read_up_to(batch, at) == s.token_ids[:t].tolist() and label == s.token_ids[t]
            met += chosen
    assert sorted(met) == list(range(len(plan.samples))) and len(met) == sum(map(len, groups))


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(60, 400), st.booleans())
def test_a_shared_cut_keeps_the_budget_and_every_sample_once(seed, ranks, max_tokens, whole):
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 20), [rng.randint(1, 12) for _ in range(rng.randint(1, 4))]) for _ in range(5)]
    groups = [siblings(rng, prompt, replies, group=g) for g, (prompt, replies) in enumerate(shapes)]
    if whole and max(sum(len(s.token_ids) for s in group) for group in groups) > max_tokens:
        max_tokens = 1000
    cut = {"ranks": ranks, "padded": False, "whole_groups": whole}
    plan = plan_update(groups, "token", max_tokens, share_prefixes=True, **cut)
    bins = [b for rank in plan.bins for b in rank]
    assert sorted(i for b in bins for i in b) == list(range(len(plan.samples)))
    assert len({len(rank) for rank in plan.bins}) == 1 and len(plan.bins) == ranks
    assert all(len(batch.input_ids) <= max_tokens for rank in plan.batches() for batch in rank)
    if whole:
        homes = [{n for n, b in enumerate(bins) for i in b if plan.groups[i] == g} for g in range(len(groups))]
        assert all(len(home) == 1 for home in homes)


def bins_of(groups, max_tokens: int, *, ranks: int = 1) -> list[list[int]]:
    plan = plan_update(groups, "token", max_tokens, ranks=ranks, padded=False, share_prefixes=True)
    return [b for rank in plan.bins for b in rank]


def test_a_group_stays_together_where_it_fits():
    """Eight groups of 40 + 4 x 10 different tokens into 200: two in each micro-batch, and not four times 50."""
    rng = random.Random(0)
    groups = [siblings(rng, 40, [11] * 4, group=g, turns=False) for g in range(8)]
    bins = bins_of(groups, 200)
    assert sorted(map(len, bins)) == [8, 8, 8, 8]
    assert all({i // 4 for i in b} == {i // 4 for i in b if sum(j // 4 == i // 4 for j in b) == 4} for b in bins)


def test_a_group_is_cut_where_it_does_not_fit_or_a_rank_would_be_idle():
    [group] = [siblings(random.Random(0), 20, [41] * 8, turns=False)]  # 20 + 8 x 40 different input tokens
    assert sorted(map(len, bins_of([group], 10_000))) == [8]
    assert sorted(map(len, bins_of([group], 200))) == [4, 4]
    assert sorted(map(len, bins_of([group], 10_000, ranks=4))) == [2, 2, 2, 2]
    with pytest.raises(RunStopped, match=r"trainer\.micro_batch_tokens=50"):
        bins_of([group], 50)


def test_copies_count_for_as_many_tokens_as_they_train():
    """Sixteen copies of one sample are few tokens, and need the logits of all."""
    [one] = siblings(random.Random(0), 3, [20])
    assert max(len(b) for b in bins_of([[one] * 16], 100)) == 5
    assert bins_of([[one] * 16], 1000) == [list(range(16))]


def test_ranks_are_balanced_by_the_cost_of_a_family_not_its_squared_size():
    """Eight replies of 1500 tokens are as many tokens as one of 12000, and attend to much less."""
    rng = random.Random(0)
    groups = [siblings(rng, 2, [1510] * 8, turns=False), siblings(rng, 2, [11_999]), siblings(rng, 2, [7_999])]
    sizes = [len(s.token_ids) - 1 for group in groups for s in group]
    spent = [sum(estimate_cost(sizes[i]) for i in b) for b in bins_of(groups, 100_000, ranks=2)]
    assert max(spent) < 1.05 * min(spent), "one of the eight is with the longest, the others are with the third"


def test_the_plan_tells_what_fraction_is_shared():
    group = siblings(random.Random(0), 31, [11] * 4, turns=False)  # 4 x 41 input tokens, 31 + 4 x 10 different
    plans = [plan_update([group], "token", 1000, padded=False, share_prefixes=share) for share in (True, False)]
    assert [shared_of(plan) for plan in plans] == [pytest.approx(3 * 31 / (4 * 41)), 0.0]
    assert shared_of(plan_update(some_groups(), "token", 1000, padded=False, share_prefixes=True)) == 0.0


def test_rows_of_their_own_share_a_system_prompt_and_nothing_short():
    """Three rows with one system prompt, two with another, and three that have 15 tokens in common."""
    rng = random.Random(0)
    rows = [siblings(rng, n, [10] * k, turns=False) for n, k in ((20, 3), (30, 2), (15, 3))]
    groups = [[sample] for family in rows for sample in family]
    plan = plan_update(groups, "token", 1000, padded=False, share_prefixes=True)
    numbers = plan.families
    assert len({*numbers[:3]}) == len({*numbers[3:5]}) == 1 and len({*numbers}) == 5
    assert shared_of(plan) == pytest.approx((2 * 20 + 30) / sum(len(s.token_ids) - 1 for [s] in groups))
    whole = plan_update(groups, "token", 1000, padded=False, share_prefixes=True, whole_groups=True)
    assert len({*whole.groups}) == 8, "they are groups of their own all the same"
    with_sibling = plan_update(
        [*groups[1:], [*groups[0], *groups[0]]], "token", 1000, padded=False, share_prefixes=True
    )
    assert len({*with_sibling.families}) == 8, "groups that have siblings stay together"


def test_padded_rows_share_nothing():
    with pytest.raises(ValueError, match="padded rows share no prefixes"):
        plan_update(some_groups(), "token", 1000, padded=True, share_prefixes=True)


def test_a_row_that_shares_nothing_holds_what_it_held_before():
    [[apart]] = micro_batches(some_groups(), "token", 10_000, padded=False)
    [[shared]] = micro_batches(some_groups(), "token", 10_000, padded=False, share_prefixes=True)
    assert (shared.parents == -1).all() and len(shared.input_ids) == len(apart.input_ids)
    assert sorted(shared.labels.tolist()) == sorted(apart.labels.tolist())
    assert torch.equal(apart.position_ids == 0, apart.segment_ids.diff(prepend=torch.tensor([-1])) > 0)
