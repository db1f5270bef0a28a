"""Inputs of a micro-batch, piece by piece: keys, columns, kept sets, routes and the batch of an idle rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core.types.images import EncodedImage, PlacedImage
from core.types.samples import TOKEN_REWARDS, Prompt
from core.types.terms import Term
from data_feeds.packing.batches import pack, plan_update, share_out
from data_feeds.packing.columns import add_columns, lay_out_columns
from data_feeds.packing.inputs import (
    check_untrained,
    count_inputs,
    fill_row,
    find_inputs,
    find_trained,
    list_inputs,
    make_keys,
    pad_columns,
)
from data_feeds.packing.kept_sets import select_kept
from data_feeds.packing.numbering import number_samples
from data_feeds.packing.prefix_tree import lay_out_row
from data_feeds.packing.routes import select_routes
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell

PAD = 5
"""Token of a part of an image."""


def see(ids: list[int], *images: tuple[str, int, int], grid: tuple[int, int] | None = None, chosen: int = 0) -> Any:
    """A sample with images (name, begin, end) that nobody opens."""
    placed = [
        PlacedImage(EncodedImage(data=b"", width=2, height=3, hash=name), begin, end, grid)
        for name, begin, end in images
    ]
    return sample_of(ids, [i == chosen for i in range(len(ids))], images=placed)


def test_tokens_of_an_image_have_numbers_of_their_own():
    samples = [
        see([7, PAD, PAD, 8, 9], ("a", 1, 3)),
        see([7, PAD, PAD, 6], ("a", 1, 3)),
        see([PAD, PAD, PAD, 7, 1], ("b", 0, 3)),
        see([PAD, PAD, 7, 1], ("a", 0, 2), grid=(1, 2)),
        see([PAD, 7, 1], ("a", 0, 1)),
        see([1, 2, 3]),
        see([4, PAD, PAD, 2, PAD, PAD, 3], ("b", 1, 3), ("a", 4, 6)),
    ]
    assert [key.tolist() for key in make_keys(samples)] == [
        [7, -1, -2, 8],
        [7, -1, -2],
        [-3, -4, -5, 7],
        [-6, -7, 7],
        [-8, 7],
        [1, 2],
        [4, -9, -10, 2, -1, -2],
    ]
    assert samples[0].token_ids.tolist() == [7, PAD, PAD, 8, 9], "the sample keeps its ids"


@pytest.mark.parametrize(
    ("sample", "inputs", "images"),
    [
        (see([1, 2, 3]), 2, []),
        (see([7, PAD, PAD, 8], ("a", 1, 3)), 3, ["a"]),
        # the last token is the image's, so all of it is left out
        (see([7, PAD, PAD], ("a", 1, 3)), 1, []),
        (see([7, PAD, PAD, 8, PAD, PAD], ("a", 1, 3), ("b", 4, 6)), 4, ["a"]),
        (see([7, PAD, PAD, PAD, PAD], ("a", 1, 3), ("b", 3, 5)), 3, ["a"]),
    ],
)
def test_inputs_are_all_tokens_but_the_last_or_its_image(sample, inputs, images):
    assert count_inputs(sample) == inputs and [place.image.hash for place in list_inputs(sample)] == images


def test_a_trained_token_of_an_image_is_an_error():
    for chosen in (1, 2):
        sample = see([7, PAD, PAD, 8], ("a", 1, 3), chosen=chosen)
        assert tell(lambda given=sample: check_untrained([see([1, 2]), given]), ValueError) == (
            "the sample of 'p' trains on the tokens of an image"
        )
    check_untrained([see([7, PAD, PAD, 8], ("a", 1, 3), chosen=3), see([PAD, 8], ("a", 0, 1), chosen=1)])


@pytest.mark.parametrize(
    ("chosen", "inputs"),
    [
        ("00110", slice(1, 3)),
        ("00001", slice(3, 4)),
        ("01111", slice(0, 4)),
        ("01011", [0, 2, 3]),
        ("00101", [1, 3]),
        ("00000", slice(0, 0)),
        # nothing predicts the first
        ("10000", slice(0, 0)),
        ("11000", slice(0, 1)),
    ],
)
def test_the_input_before_a_token_predicts_it(chosen, inputs):
    sample, mask = see([1, 2, 3, 4, 5]), np.array([one == "1" for one in chosen])
    found, n = find_trained(sample, mask)
    assert (found if isinstance(found, slice) else found.tolist()) == inputs and n == sum(mask[1:])
    both = find_inputs([sample, sample], [mask, np.array([False, True, False, False, False])])
    assert both.counts == [n, 1]
    values = [np.array([10, 11, 12, 13, 14]), np.array([20, 21, 22, 23, 24])]
    assert both.select(values).tolist() == [*values[0][1:][mask[1:]].tolist(), 21]


def test_an_image_at_the_end_is_predicted_by_nothing():
    sample = see([7, 8, PAD, PAD], ("a", 2, 4))
    assert find_trained(sample, np.array([False, True, True, True])) == (slice(0, 2), 2)


def test_columns_of_several_numbers_get_one_width():
    one, two = np.array([1.0, 2.0]), np.array([[1.0, 2.0], [3.0, 4.0]])
    three = np.array([[5.0, 6.0, 7.0]])
    assert pad_columns([one, one]) == [one, one]
    same = [two, two]
    assert pad_columns(same) is same
    wide, long = pad_columns([two, three])
    assert wide.tolist() == [[1.0, 2.0, -1.0], [3.0, 4.0, -1.0]] and long.tolist() == three.tolist()


def test_a_row_has_the_ids_again_and_each_image_once():
    samples = [
        see([PAD, PAD, 2, 2, 2, 2], ("b", 0, 2)),
        see([7, PAD, PAD, 8, 9], ("a", 1, 3)),
        see([7, PAD, PAD, 6, 9], ("a", 1, 3)),
    ]
    row = lay_out_row(make_keys(samples), [1, 0, 0])
    ids, rope, images = fill_row(samples, row)
    # the prefix of the two comes first, since it is shorter than the first sample
    assert ids.tolist() == [7, PAD, PAD, PAD, PAD, 2, 2, 2, 8, 6]
    assert rope is None and [image.hash for image in images] == ["a", "b"]
    texts = [see([1, 2, 3]), see([1, 4])]
    ids, rope, images = fill_row(texts, lay_out_row(make_keys(texts)))
    assert (ids.tolist(), rope, images) == ([1, 2, 1], None, ())


def routed(*numbers: int) -> Any:
    """A sample with the expert of each token, in the only block."""
    routes = np.array(numbers, dtype=np.uint8)[:, None, None]
    return sample_of([*range(len(numbers))], [False] * len(numbers), routes=routes)


def test_a_shared_token_has_the_route_of_the_first_sample_that_knows_it():
    shared = [np.array([0, 1]), np.array([0, 1]), np.array([0, 1, 3])]
    found = select_routes([routed(1, 255, 255), routed(9, 4, 255), routed(8, 6, 2, 255)], shared, 5)
    assert found is not None and found.dtype == torch.int16
    assert found.flatten().tolist() == [1, 4, -1, 2, -1]
    bare = sample_of([1, 2], [False, True])
    assert select_routes([bare, bare], shared[:2], 5) is None
    beside = select_routes([bare, routed(9, 4, 255)], [np.array([2]), np.array([0, 1])], 3)
    assert beside is not None and beside.flatten().tolist() == [9, 4, -1]
    wide = sample_of([1, 2], [False, True], routes=np.zeros((2, 2, 1), dtype=np.uint8))
    assert tell(lambda: select_routes([wide, routed(1, 2)], [np.array([0]), np.array([1])], 2), ValueError) == (
        "the routes of a micro-batch have several shapes [layers, k]: [(1, 1), (2, 1)]"
    )


def test_kept_sets_are_those_of_the_predicted_tokens():
    kept = sample_of([1, 2, 3, 4], [False, False, True, True], kept=[[], [], [3, 9], [4]])
    given = sample_of([1, 2, 3], [False, True, True], versions=[-1] * 3)
    found = select_kept([kept, given], [slice(1, 3), np.array([0, 1])])
    assert found is not None and (found.ids.tolist(), found.sizes.tolist()) == ([3, 9, 4], [2, 1, 0, 0])
    assert select_kept([given, given], [slice(0, 1)] * 2) is None
    sampled = sample_of([1, 2, 3], [False, True, True], versions=[-1, -1, 0])
    assert tell(lambda: select_kept([kept, sampled], [slice(1, 3), slice(0, 2)]), ValueError) == (
        "a sample of 'p' has no kept sets, and others of its micro-batch have: a sample of truncated sampling "
        "(rollout.top_p, top_k, min_p) must keep Sample.kept"
    )
    found = select_kept([kept, sampled], [slice(1, 2), slice(0, 1)])
    assert found is not None and found.sizes.tolist() == [2, 0]


def test_tokens_have_the_columns_of_their_samples():
    columns = {"prox_logp": [0, -1, -2], "mine": [7, 8, 9], TOKEN_REWARDS: [1, 1, 1]}
    one = sample_of([1, 2, 3], [False, True, True], columns=columns, advantage=[0, 2, 3])
    tokens = pack([one], [0.5]).tokens
    assert tokens.prox_logp.tolist() == [-1, -2] and tokens.advantage.tolist() == [2, 3]
    assert {name: values.tolist() for name, values in tokens.columns.items()} == {"mine": [8, 9]}
    assert not tokens.has("ref_logp") and tokens.weight.tolist() == [0.5, 0.5]


def test_an_idle_rank_has_the_shortest_sample_and_none_of_its_tokens():
    long = sample_of([1, 2, 3, 4], [False, True, True, True], advantage=[0, 1, 2, 3], columns={"mine": [0] * 4})
    short = sample_of([5, 6], [False, True], advantage=[0, 1], columns={"mine": [0] * 2})
    plan = plan_update([[long], [short], [short]], "token", 100, padded=False, ranks=2)
    idle = plan.make_idle_batch(torch.float64)
    assert (idle.input_ids.tolist(), idle.labels.tolist(), idle.at.tolist()) == ([5], [], [])
    assert idle.tokens.advantage.shape == idle.tokens.columns["mine"].shape == (0,) and idle.kept is None
    assert idle.tokens.seq_ids.tolist() == []
    kept = sample_of([1, 2], [False, True], kept=[[], [2, 7]])
    alone = plan_update([[kept]], "token", 100, padded=False, ranks=2, share_prefixes=True)
    batches = alone.batches()
    [empty] = [batch for [batch] in batches if not len(batch.labels)]
    assert empty.kept is not None and (empty.kept.ids.tolist(), empty.kept.sizes.tolist()) == ([], [])
    assert alone.measure_shared(batches) == 0.0 and alone.padding == 0.0


def test_columns_of_a_trainer_go_back_to_their_samples():
    first = sample_of([1, 2, 3], [False, True, True], columns={"mine": [1, 2, 3]})
    second = sample_of([1, 2, 3, 4], [False, True, False, True])
    plan = plan_update([[first], [second]], "token", 100, padded=False)
    [[chosen]] = plan.bins
    of_sample = {0: [0.5, 0.25], 1: [0.75, 1.0]}
    values = np.array([value for i in chosen for value in of_sample[i]])
    laid = lay_out_columns(plan, [[{"ref_logp": values}]], fill=9.0)
    assert laid[id(plan.samples[0])]["ref_logp"].tolist() == [9.0, 0.5, 0.25]
    assert laid[id(plan.samples[1])]["ref_logp"].tolist() == [9.0, 0.75, 9.0, 1.0]
    added = add_columns(plan, [[{"ref_logp": values}]])
    one = added[id(plan.samples[0])]
    assert one.columns["ref_logp"].tolist() == [0.0, 0.5, 0.25] and one.columns["mine"].tolist() == [1, 2, 3]


def test_a_sample_of_the_denominator_alone_has_no_weight():
    def loss(policy: Any, tokens: Any) -> Any:
        return -policy.logp, {}

    three = Term("three", loss, on=lambda sample: sample.token_ids == 3, among="sampled")
    mask = [False, True, True]
    groups = [[sample_of([1, 3, 2], mask)], [sample_of([1, 2, 2], mask)]]
    [share] = share_out([three], groups, "token", horizon=5)
    assert share.weights == [1 / 4, 0.0] and share.masks[0].tolist() == [False, True, False]
    plan = plan_update(groups, "token", 100, padded=False, terms=[three])
    assert plan.samples == [groups[0][0]] and plan.weights == [1 / 4]


def test_samples_are_numbered_by_source_in_the_order_of_the_recipe():
    def of(source: str) -> Any:
        return sample_of([1, 2], [False, True], prompt=Prompt(id="p", messages=[], source=source))

    given: Any = {"counts": [1, 2, 1], "has_seq_ids": True}
    found = number_samples([of("a"), of("b"), of("b")], [4, 2, 4], None, sources=("b", "a"), **given)
    assert found == {"group_ids": [0, 1, 0], "seq_ids": [0, 1, 2], "source_ids": [1, 0, 0]}
    empty = number_samples([of("a")] * 3, None, [8, 9, 8], sources=(), **given | {"counts": [0, 2, 1]})
    assert empty == {"seq_ids": [1, 0, 1]}
