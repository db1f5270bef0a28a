"""Images of the samples in one packed row: prefix sharing, order and positions.

Images of equal size have equal token ids, but different features. So token ids alone never decide which prefixes
samples share: the tokens of each image are replaced by unique numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.types.arrays import Ids
from core.types.images import EncodedImage, PlacedImage
from core.types.samples import Sample
from data_feeds.packing.prefix_tree import Row
from modeling.images.rope_positions import find_rope_ids

Ints = NDArray[np.int64]


def count_inputs(sample: Sample) -> int:
    """Return the number of input tokens of a sample: all but the last token, which predicts nothing.

    If the last token is an image's, the whole image is excluded, since it cannot be computed in part.
    """
    n = len(sample.token_ids) - 1
    return sample.images[-1].begin if sample.images and sample.images[-1].end > n else n


def make_keys(samples: Sequence[Sample]) -> list[Ids]:
    """Return each sample's input tokens, with unique negative numbers in place of image tokens.

    Samples may share tokens as far as their keys agree. The same position of the same image has the same number in all
    of these samples, and no other position has it.
    """
    first: dict[tuple[str, int, tuple[int, int] | None], int] = {}
    used = 0
    keys: list[Ids] = []
    for sample in samples:
        key = sample.token_ids[: count_inputs(sample)]
        keys.append(key.copy() if sample.images else key)
        for place in list_inputs(sample):
            n = place.end - place.begin
            name = place.image.hash, n, place.grid
            if name not in first:
                first[name], used = used, used + n
            keys[-1][place.begin : place.end] = -1 - first[name] - np.arange(n)
    return keys


def list_inputs(sample: Sample) -> list[PlacedImage]:
    """Return the images of the input tokens."""
    if not sample.images:
        return []
    n = count_inputs(sample)
    return [place for place in sample.images if place.begin < n]


def fill_row(samples: Sequence[Sample], row: Row) -> tuple[Tensor, Tensor | None]:
    """Return the token ids [T] of a packed row, and positions [3, T] if images have grids (M-RoPE), else None."""
    images = [list_inputs(s) for s in samples]
    if not any(images):
        return torch.from_numpy(row.input_ids), None  # the keys are the ids
    has_grids = any(place.grid is not None for places in images for place in places)
    ids, rope = np.empty_like(row.input_ids), np.empty((3, len(row.input_ids)), dtype=np.int64)
    for sample, own, where in zip(samples, images, row.places, strict=True):
        ids[where] = sample.token_ids[: len(where)]
        if has_grids:
            rope[:, where] = find_rope_ids(len(where), own)
    return torch.from_numpy(ids), torch.from_numpy(rope) if has_grids else None


def order_images(samples: Sequence[Sample], places: Sequence[Ints]) -> tuple[EncodedImage, ...]:
    """Return the images of a row in token order. A shared image occurs once."""
    found = {int(where[p.begin]): p.image for s, where in zip(samples, places, strict=True) for p in list_inputs(s)}
    return tuple(found[place] for place in sorted(found))
