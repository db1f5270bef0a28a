"""Segments of a packed row against a plain reading of them: a token sees its ancestors' tokens, and its own so far."""

from __future__ import annotations

from itertools import accumulate, chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling.image_blocks import ImageBlocks, ImageEnds, find_ends
from modeling.segments import Segments

CPU = torch.device("cpu")
IMAGE = 9
BLOCKS = ImageBlocks(token=IMAGE, types="token_type_ids", in_windows_only=True)


@st.composite
def forests(draw) -> Segments:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    parents = [draw(st.integers(-1, i - 1)) for i in range(len(lengths))]
    return Segments(lengths, parents)


def list_paths(segments: Segments) -> list[list[int]]:
    """Row positions of each segment after all of its ancestors."""
    ends = [*accumulate(segments.lengths)]
    own = [[*range(end - n, end)] for end, n in zip(ends, segments.lengths, strict=True)]
    paths: list[list[int]] = []
    for i, parent in enumerate(segments.parents):
        paths.append(own[i] if parent < 0 else paths[parent] + own[i])
    return paths


@settings(max_examples=60, deadline=None)
@given(
    forests(),
    st.one_of(st.none(), st.integers(1, 9)),
    st.one_of(st.none(), st.integers(0, 2)),
    st.lists(st.booleans(), min_size=28, max_size=28),
    st.booleans(),
)
def test_a_mask_shows_what_a_token_may_attend_to(segments, window, leading, are_image, sees_images):
    paths, total = list_paths(segments), sum(segments.lengths)
    ids = torch.tensor([IMAGE if yes else 1 for yes in are_image[:total]])
    numbers = torch.repeat_interleave(torch.arange(len(segments.lengths)), torch.tensor(segments.lengths))
    found = find_ends(BLOCKS, ids, numbers) if sees_images else None
    ends = [*range(total)]
    for t in reversed(range(total - 1)):
        if are_image[t] and are_image[t + 1] and numbers[t] == numbers[t + 1] and sees_images:
            ends[t] = ends[t + 1]
    assert (found is None) == (not sees_images or not any(are_image[:total]))
    assert found is None or found.ends.tolist() == ends
    image_ends = None if found is None else found.ends
    for run in segments.runs:
        mask = segments.find_mask(run, window, CPU, leading=leading, image_ends=image_ends)
        assert (run.own, run.above) == (segments.lengths[run.first], len(paths[run.first]) - run.own)
        wanted = []
        for number in range(run.first, run.first + run.count):
            above = len(paths[number]) - segments.lengths[number]
            assert above == run.above
            rows = []
            for t, place in enumerate(paths[number][above:], above):
                last = t + ends[place] - place
                row = [c <= last and (window is None or c > t - window) for c in range(len(paths[number]))]
                rows.append([True] * (leading or 0) + row)
            wanted.append(rows)
        has_image = any(ends[p] != p for n in range(run.first, run.first + run.count) for p in paths[n][run.above :])
        is_narrow = window is not None and window < run.own
        assert (mask is None) == (not has_image and run.above == 0 and not is_narrow and leading is None)
        if mask is not None:
            each = mask[:, 0] if has_image else mask.expand(run.count, *mask.shape)
            assert each.tolist() == wanted


@settings(max_examples=40, deadline=None)
@given(forests())
def test_runs_and_indices_are_those_of_the_whole_sequences(segments):
    paths, lengths = list_paths(segments), segments.lengths
    assert segments.are_shared == any(parent >= 0 for parent in segments.parents)
    shapes = [(n, len(path) - n) for n, path in zip(lengths, paths, strict=True)]
    assert [(run.own, run.above) for run in segments.runs for _ in range(run.count)] == shapes
    assert [run.first for run in segments.runs] == [0, *accumulate(run.count for run in segments.runs[:-1])]
    merged = [(run.own, run.above) for run in segments.runs]
    assert all(a != b for a, b in pairwise(merged))
    keys = segments.index_keys(CPU)
    assert keys is segments.index_keys(CPU)
    assert (keys.keys is not None) == segments.are_shared
    if keys.keys is not None:
        assert keys.keys.tolist() == [*chain(*paths)]
    assert keys.query_ends.tolist() == [0, *accumulate(lengths)]
    assert keys.key_ends.tolist() == [0, *accumulate(map(len, paths))]
    assert (keys.longest_query, keys.longest_key) == (max(lengths), max(map(len, paths)))
    assert keys.query_ends.dtype == keys.key_ends.dtype == torch.int32
    index = segments.index_paths(CPU)
    assert index is segments.index_paths(CPU)
    width = max(map(len, paths))
    assert index.places.tolist() == [path + path[-1:] * (width - len(path)) for path in paths]
    rows = [i for i, n in enumerate(lengths) for _ in range(n)]
    assert (index.back // width).tolist() == rows
    assert index.places.flatten()[index.back].tolist() == [*range(sum(lengths))]


def test_masks_of_equal_runs_are_one_and_others_are_not():
    segments = Segments([2, 3, 3, 1, 3, 3], [-1, 0, 0, 0, 0, 0])
    assert [(run.first, run.count) for run in segments.runs] == [(0, 1), (1, 2), (3, 1), (4, 2)]
    first, second = segments.runs[1], segments.runs[3]
    plain = segments.find_mask(first, None, CPU)
    assert plain is segments.find_mask(second, 5, CPU) and plain is not segments.find_mask(second, 4, CPU)
    assert plain is not segments.find_mask(first, None, CPU, leading=0)
    images = torch.tensor([0, 1, 3, 3, *range(4, 15)])
    assert segments.find_mask(first, None, CPU, image_ends=images).shape == (2, 1, 3, 5)
    assert segments.find_mask(second, None, CPU, image_ends=images) is plain


@pytest.mark.parametrize("parent", [1, 2])
def test_a_segment_continues_one_before_it(parent):
    with pytest.raises(ValueError) as refused:
        Segments([1, 1, 1], [-1, parent, -1])
    assert str(refused.value) == f"segment 1 continues segment {parent}, which must come before it"


def test_images_count_in_layers_with_a_window_where_the_model_says_so():
    ends = torch.arange(3)
    for in_windows_only, windows in ((True, [4]), (False, [4, None])):
        images = ImageEnds(ends=ends, in_windows_only=in_windows_only)
        assert [w for w in (4, None) if images.for_layer(w) is not None] == windows
