"""Trees of shared prefixes to the letter: segments in their order, and the cuts of a family that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.types.samples import Sample
from data_feeds.packing.bin_packing import TooLarge, estimate_cost, pack_into_bins, pack_units
from data_feeds.packing.prefix_bins import LEAST_SHARED, find_families, pack_families
from data_feeds.packing.prefix_tree import gather_families, lay_out_row, sort_by_prefix
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell

A, B, C, D = [1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6], [9]
ROWS: list[tuple[list[list[int]], list[str] | None, dict[str, list[Any]]]] = [
    (
        [A, B, C, D],
        ["a", "a", "a", "b"],
        {
            # segments by depth, start and stop: D, 1 2, 5, 3, 6, 4
            "input_ids": [9, 1, 2, 5, 3, 6, 4],
            "position_ids": [0, 0, 1, 2, 2, 3, 3],
            "segment_ids": [0, 1, 1, 2, 3, 4, 5],
            "parents": [-1, -1, 1, 1, 3, 3],
            "places": [[1, 2, 4, 6], [1, 2, 3], [1, 2, 4, 5], [0]],
        },
    ),
    (
        # a copy, and one that another begins with
        [[1, 2], [1, 2, 3], [1, 2]],
        ["a", "a", "a"],
        {
            "input_ids": [1, 2, 3],
            "position_ids": [0, 1, 2],
            "segment_ids": [0, 0, 1],
            "parents": [-1, 0],
            "places": [[0, 1], [0, 1, 2], [0, 1]],
        },
    ),
    (
        # nothing in common, and the longer one comes last
        [[5, 6, 7], [8], [4, 6]],
        ["a", "a", "a"],
        {
            "input_ids": [8, 4, 6, 5, 6, 7],
            "position_ids": [0, 0, 1, 0, 1, 2],
            "segment_ids": [0, 1, 1, 2, 2, 2],
            "parents": [-1, -1, -1],
            "places": [[3, 4, 5], [0], [1, 2]],
        },
    ),
    (
        [A, B],
        None,
        {
            "input_ids": [*A, *B],
            "position_ids": [0, 1, 2, 3, 0, 1, 2],
            "segment_ids": [0, 0, 0, 0, 1, 1, 1],
            "parents": [-1, -1],
            "places": [[0, 1, 2, 3], [4, 5, 6]],
        },
    ),
    (
        [[], [1]],
        ["a", "a"],
        {"input_ids": [1], "position_ids": [0], "segment_ids": [0], "parents": [-1], "places": [[], [0]]},
    ),
    ([], [], {"input_ids": [], "position_ids": [], "segment_ids": [], "parents": [], "places": []}),
]


@pytest.mark.parametrize(("sequences", "families", "row"), ROWS)
def test_a_row_is_laid_out_to_the_letter(sequences, families, row):
    made = lay_out_row(sequences, families)
    found = {name: getattr(made, name).tolist() for name in row if name != "places"}
    assert found | {"places": [place.tolist() for place in made.places]} == row
    assert made.lengths == [len(sequence) for sequence in sequences]


def test_sequences_are_sorted_by_their_ids():
    def sort(*sequences: list[int]) -> Any:
        return sort_by_prefix([np.array(one, dtype=np.int32) for one in sequences])

    assert sort() == ([], [])
    assert sort([256], [1], [1, 70_000], [1, 300]) == ([1, 3, 2, 0], [0, 1, 1, 0])
    assert sort([4, 5, 6], [4, 5], [4, 5, 6]) == ([1, 0, 2], [0, 2, 3])
    assert gather_families([3, 0, 2, 1], ["a", "b", "a", "b"]) == [[3, 1], [0, 2]]


def family(prompt: int, replies: list[int], *, first: int = 0) -> list[Sample]:
    """Samples with so many inputs of a prompt in common, and so many of their own."""
    shown = [*range(1, prompt + 1)]
    made: list[Sample] = []
    for i, n in enumerate(replies):
        ids = [first + token for token in [*shown, *range(1000 * (i + 1), 1000 * (i + 1) + n + 1)]]
        made.append(sample_of(ids, [t >= prompt for t in range(len(ids))]))
    return made


@pytest.mark.parametrize(
    ("budget", "parts"),
    [
        (40, [[0, 1, 2, 3, 4, 5]]),
        (39, [[0, 1, 2, 3, 4], [5]]),
        (25, [[0, 1, 2], [3, 4, 5]]),
        (24, [[0, 1], [2, 3], [4, 5]]),
        (15, [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_a_family_is_cut_where_its_tokens_reach_the_budget(budget, parts):
    """Ten tokens of the prompt, which every part has, and five of each reply."""
    samples = family(10, [5] * 6)
    bins = pack_families(samples, [0] * 6, budget)
    assert sorted(sorted(one) for one in bins) == parts
    assert tell(lambda: pack_families(samples, [0] * 6, 14), TooLarge) == (
        "a sequence of 15 tokens does not fit trainer.micro_batch_tokens=14: raise it"
    )
    if len(parts) > 1:
        assert tell(lambda: pack_families(samples, [0] * 6, budget, whole=True), TooLarge) == (
            f"a sequence of 40 tokens does not fit trainer.micro_batch_tokens={budget}: raise it"
        )


@pytest.mark.parametrize(
    ("replies", "bins"),
    [
        # as many own tokens on both sides
        ([1, 1, 1, 1, 4], [[4], [0, 1, 2, 3]]),
        ([4, 1, 1, 1, 1], [[0], [1, 2, 3, 4]]),
        ([2, 2, 2, 2], [[0, 1], [2, 3]]),
        # one reply has most of them
        ([1, 30, 1], [[1], [0, 2]]),
    ],
)
def test_a_family_is_cut_evenly_between_ranks(replies, bins):
    assert pack_families(family(10, replies), [0] * len(replies), 1000, ranks=2) == bins


def test_one_rank_cuts_a_tree_where_little_is_shared():
    """Two branches of 40 tokens after 2 in common do not fit together; a cut in a branch computes 42 tokens again."""
    branches = [[1, 2, first, *range(39)] for first in (100, 200)]
    ids = [[*branch, *range(n, n + 5)] for branch in branches for n in (300, 400, 500)]
    samples = [sample_of(one, [t >= 42 for t in range(len(one))]) for one in ids]
    assert sorted(map(sorted, pack_families(samples, [0] * 6, 101))) == [[0, 1, 2], [3, 4, 5]]


def test_a_cut_that_saves_no_time_is_not_made():
    """Of two families of one size each rank gets one, and neither computes a prompt twice."""
    samples = [*family(50, [5, 5]), *family(50, [5, 5], first=5000)]
    assert sorted(map(sorted, pack_families(samples, [0, 0, 1, 1], 1000, ranks=2))) == [[0, 1], [2, 3]]
    # a long prompt and short replies: the prompt twice costs more than is saved
    assert pack_families(family(500, [2, 2]), [0, 0], 1000, ranks=2) == [[0, 1], []]
    assert sorted(pack_families(family(5, [200, 200]), [0, 0], 1000, ranks=2)) == [[0], [1]]


def test_groups_of_one_sample_share_a_prompt_from_sixteen_tokens_on():
    for shared, is_family in ((LEAST_SHARED, True), (LEAST_SHARED - 1, False)):
        numbers = find_families(family(shared, [3, 4]), [7, 8])
        assert (numbers[0] == numbers[1]) == is_family
    assert find_families(family(40, [3, 4, 5]), [2, 2, 9]) == [2, 2, 9], "groups stay what they are"
    apart = [*family(20, [3]), *family(20, [3], first=5000), *family(20, [4])]
    numbers = find_families(apart, [0, 1, 2])
    assert numbers[0] == numbers[2] != numbers[1]


def test_units_count_their_longest_row_or_their_sum():
    assert pack_units([3, 5, 4], [0, 0, 1], 10, ranks=1, padded=True) == [[0, 1], [2]]
    assert tell(lambda: pack_units([3, 5], [0, 0], 9, ranks=1, padded=True), TooLarge).startswith("a sequence of 10 ")
    assert pack_units([3, 5], [0, 0], 8, ranks=1, padded=False) == [[0, 1]]
    assert tell(lambda: pack_units([3, 5], [0, 0], 7, ranks=1, padded=False), TooLarge).startswith("a sequence of 8 ")
    error = TooLarge(8, 7)
    assert error.tokens == 8


def test_padded_bins_are_as_even_as_their_number_allows():
    # two bins are needed, and a budget of 6 is the least that two keep
    assert pack_into_bins([3, 3, 2, 2, 2], 9) == [[0, 1], [2, 3, 4]]
    assert pack_into_bins([4, 4, 4, 4], 12, ranks=2) == [[0, 1], [2, 3]]
    assert pack_into_bins([4, 4, 4, 4], 16, ranks=4) == [[0], [1], [2], [3]]
    assert estimate_cost(3072) == 3072 * 1.25 and estimate_cost(0) == 0
    assert estimate_cost(np.array([0, 12_288])).tolist() == [0, 24_576]
