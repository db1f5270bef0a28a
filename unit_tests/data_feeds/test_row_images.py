"""Images in rows: what is shared, in which order they come, and where their tokens stand."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algs.kto import KTO
from core.types.images import EncodedImage, PlacedImage
from core.types.samples import Batch, Sample
from data_feeds.packing.batches import micro_batches, pack, plan_update
from data_feeds.packing.inputs import count_inputs
from driver.rl.scoring import hash_sample
from modeling.images.rope_positions import find_rope_ids
from unit_tests.helpers.examples import sample_of, shared_of

PAD = 5
"""The token that stands for a part of an image."""


def named(name: str) -> EncodedImage:
    """An image that nobody opens."""
    return EncodedImage(data=name.encode(), width=4, height=4, hash=name)


def seen(*parts: list[int] | tuple[str, int, int] | str, tail: int = 2, grids: bool = True) -> Sample:
    """A sample of token ids and images (name, rows, columns), whose last `tail` tokens are trained on."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, tuple):
            name, rows, columns = part
            begin, end = len(ids), len(ids) + rows * columns
            grid = (rows, columns) if grids else None
            images.append(PlacedImage(image=named(name), begin=begin, end=end, grid=grid))
            ids += [PAD] * (rows * columns)
        else:
            ids += part
    n = len(ids)
    return sample_of(ids, [False] * (n - tail) + [True] * tail, rollout_logp=[0.0] * n, images=tuple(images))


def shared(*samples: Sample) -> Batch:
    return pack([*samples], [1.0] * len(samples), families=[0] * len(samples))


def names(batch: Batch) -> list[str]:
    return [image.hash for image in batch.images]


def sequences_of(batch: Batch) -> list[list[tuple[int, int, int, int]]]:
    """Of every leaf of the forest: the positions by three axes and the id of each token from the root on."""
    parents, rope = batch.parents.tolist(), batch.rope_ids
    assert rope is not None
    found = []
    for leaf in (s for s in range(len(parents)) if s not in parents):
        chain = [leaf]
        while parents[chain[0]] >= 0:
            chain.insert(0, parents[chain[0]])
        places = torch.cat([torch.nonzero(batch.segment_ids == s)[:, 0] for s in chain])
        found.append(torch.cat([rope[:, places], batch.input_ids[None, places]]).T.tolist())
    return found


def test_the_same_ids_of_other_images_are_never_shared():
    a, b = (seen([7, 8], (name, 2, 2), [9, 10, 11]) for name in ("a", "b"))
    assert a.token_ids.tolist() == b.token_ids.tolist()
    batch = shared(a, b, a)
    assert batch.parents.tolist() == [-1, 0, 0], "the text before the image, and then one branch for each image"
    assert torch.bincount(batch.segment_ids).tolist() == [2, 6, 6]
    assert names(batch) == ["a", "b"]
    assert batch.input_ids.tolist() == [7, 8, *[PAD] * 4, 9, 10, *[PAD] * 4, 9, 10]
    plan = plan_update([[a, b]], "token", 100, padded=False, share_prefixes=True)
    assert shared_of(plan) == pytest.approx(2 / 16)
    assert shared_of(plan_update([[a, a]], "token", 100, padded=False, share_prefixes=True)) == pytest.approx(8 / 16)


def test_a_budget_counts_what_other_images_really_take():
    """Were ids alone compared, 8 tokens would seem to hold both."""
    a, b = (seen([7, 8], (name, 2, 2), [9, 10, 11]) for name in ("a", "b"))
    [rank] = micro_batches([[a, b]], "token", 13, padded=False, share_prefixes=True)
    assert sorted(len(batch.input_ids) for batch in rank) == [8, 8]
    [[both]] = micro_batches([[a, b]], "token", 14, padded=False, share_prefixes=True)
    assert len(both.input_ids) == 14


def test_images_come_in_the_order_of_the_row_and_not_of_the_samples():
    long = seen(("c", 1, 2), [1] * 9)
    prompt = ([7], ("a", 2, 2), [8])
    first, second = seen(*prompt, ("b", 1, 3), [9, 9, 9]), seen(*prompt, ("d", 1, 1), [9, 9, 9])
    batch = pack([first, long, second], [1.0] * 3, families=[0, 1, 0])
    at = [batch.segment_ids[i].item() for i in range(len(batch.input_ids)) if batch.input_ids[i] == PAD]
    of = {at.count(n): n for n in at}  # the four images take 4, 3, 2 and 1 tokens, each in a segment of its own
    lengths = {"a": 4, "b": 3, "c": 2, "d": 1}
    assert names(batch) == sorted("abcd", key=lambda name: of[lengths[name]])
    assert names(batch) != ["a", "b", "c", "d"]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(1, 3), st.integers(1, 3)), max_size=4))
def test_text_counts_on_and_a_image_is_a_grid(parts):
    """By a definition that goes token by token."""
    samples = seen(*[part for n, name, r, c in parts for part in ([9] * n, (name, r, c))], [9, 9, 9])
    expected, position = [], 0
    grids = {place.begin: place.grid for place in samples.images}
    at = 0
    while at < len(samples.token_ids):
        if at in grids:
            rows, columns = grids[at]
            expected += [(position, position + r, position + c) for r in range(rows) for c in range(columns)]
            position += max(rows, columns)
            at += rows * columns
        else:
            expected.append((position,) * 3)
            position, at = position + 1, at + 1
    assert find_rope_ids(len(samples.token_ids), samples.images).T.tolist() == [list(p) for p in expected]


def test_shared_beginnings_keep_the_positions_of_every_sample():
    prompt = ([7], ("a", 2, 3), [8])
    samples = [seen(*prompt, [9, 1, 2]), seen(*prompt, ("b", 3, 1), [9, 4, 5]), seen(*prompt, ("c", 3, 1), [9, 4, 5])]
    samples.append(seen([7, 7, 7, 7]))  # text alone, in a row with grids
    batch = shared(*samples)
    wanted = []
    for s in samples:
        n = len(s.token_ids) - 1
        wanted.append(np.concatenate([find_rope_ids(n, s.images), s.token_ids[None, :n]]).T.tolist())
    assert sorted(sequences_of(batch)) == sorted(wanted)
    assert sorted(names(batch)) == ["a", "b", "c"]


def test_families_without_grids_have_no_rope_ids():
    assert shared(seen([7], ("a", 2, 2), [8, 9, 9], grids=False)).rope_ids is None
    assert shared(seen([7, 8, 9])).rope_ids is None
    with pytest.raises(ValueError, match="the grid None"):
        shared(seen([7], ("a", 2, 2), [8, 9, 9]), seen([7], ("b", 2, 2), [8, 9, 9], grids=False))


def test_a_image_at_the_very_end_is_left_out_as_a_whole():
    """The last token predicts nothing, and an image without its last token would need a part of its features."""
    whole = seen([7, 8], ("a", 1, 2), [9, 10, 11])
    mask = [False, True, False, False, False, False]
    ends = replace(
        seen([7, 8], ("a", 2, 2), tail=0), action_mask=np.array(mask), rollout_logp=np.arange(6, dtype=np.float32)
    )
    assert count_inputs(ends) == 2 and count_inputs(whole) == 6
    batch = pack([ends, whole], [1.0, 1.0])
    assert batch.input_ids.tolist() == [7, 8, 7, 8, PAD, PAD, 9, 10]
    assert batch.labels.tolist() == [8, 10, 11] and batch.at.tolist() == [0, 6, 7]
    assert batch.tokens.rollout_logp.tolist() == [1.0, 0.0, 0.0]
    assert names(batch) == ["a"]


def test_turns_before_a_image_at_the_very_end_are_trained_on():
    ends = seen([1, 2, 3, 4], ("a", 2, 2), tail=0)
    mask = np.array([False, True, False, True, False, False, False, False])
    batch = pack([replace(ends, action_mask=mask, rollout_logp=np.arange(8, dtype=np.float32))], [1.0])
    assert batch.labels.tolist() == [2, 4] and batch.at.tolist() == [0, 2]
    assert batch.tokens.rollout_logp.tolist() == [1.0, 3.0]


def test_the_tokens_of_a_image_are_never_trained_on():
    sample = seen([7, 8], ("a", 1, 2), [9, 9], tail=3)
    with pytest.raises(ValueError, match="trains on the tokens of an image"):
        plan_update([[sample]], "token", 100)


def test_a_batch_with_images_crosses_processes():
    batch = shared(seen([7], ("a", 2, 2), [8, 9, 9]))
    batch = replace(batch, media={"pixel_values": torch.randn(2, 3).bfloat16(), "grid": torch.tensor([[1, 2, 2]])})
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(sent, buffers=[b.raw().tobytes() for b in buffers])
    assert again.images == batch.images
    assert torch.equal(again.rope_ids, batch.rope_ids) and torch.equal(again.input_ids, batch.input_ids)
    assert {name: (x.dtype, x.tolist()) for name, x in again.media.items()} == {
        name: (x.dtype, x.tolist()) for name, x in batch.media.items()
    }
    there = again.to("meta")
    assert {x.device.type for x in (there.rope_ids, *there.media.values())} == {"meta"}


def test_a_precomputed_reference_is_not_that_of_another_image():
    a, b = (seen([7, 8], (name, 2, 2), [9, 10, 11]) for name in ("a", "b"))
    assert hash_sample(a) != hash_sample(b) and hash_sample(a) == hash_sample(seen([7, 8], ("a", 2, 2), [9, 10, 11]))


def test_ktos_mismatched_answers_keep_the_images_of_prompt_and_answer():
    """The prompt's are those of its own row, and one in a later turn moves with the answer."""
    mask = [False] * 3 + [True] + [False] * 2 + [True]
    first = replace(seen([7], ("a", 1, 2), [8], ("b", 2, 1), [9], tail=0), action_mask=np.array(mask))
    second = seen([7, 7, 7, 7], ("c", 1, 2), [6, 5])
    groups = KTO().prepare_groups([[first], [second]])
    wrong = groups[1][1]
    assert wrong.token_ids.tolist() == [7, 7, 7, 7, PAD, PAD, 8, PAD, PAD, 9]
    assert [(p.image.hash, p.begin, p.end) for p in wrong.images] == [("c", 4, 6), ("b", 7, 9)]
    assert [(p.image.hash, p.begin, p.end) for p in groups[0][1].images] == [("a", 1, 3)]
