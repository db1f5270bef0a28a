"""Inputs of a forward pass: the tokens of a sample to compute, and the keys for prefix sharing.

For text, token ids decide both. Images of equal size have equal token ids, but different features. So in keys the
tokens of each image are replaced by unique numbers, and token ids alone never decide which prefixes samples share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.types.arrays import Ids, Mask, find_true
from core.types.images import EncodedImage, PlacedImage
from core.types.samples import Sample
from data_feeds.packing.prefix_tree import Row


def count_inputs(sample: Sample) -> int:
    """Return the number of input tokens of a sample: all but the last token, which predicts nothing.

    If the last token is an image's, the whole image is excluded, since it cannot be computed in part.
    """
    n = len(sample.token_ids) - 1
    return sample.images[-1].begin if sample.images and sample.images[-1].end > n else n


def list_inputs(sample: Sample) -> list[PlacedImage]:
    """Return the images of the input tokens."""
    if not sample.images:  # of text, without counting
        return []
    n = count_inputs(sample)
    return [place for place in sample.images if place.begin < n]


def make_keys(samples: Sequence[Sample]) -> list[Ids]:
    """Return each sample's input tokens, with unique negative numbers in place of image tokens.

    Samples may share tokens as far as their keys agree. The same position of the same image has the same number in all
    of these samples, and no other position has it.
    """
    first: dict[tuple[str, int, tuple[int, int] | None], int] = {}
    used = 0
    keys: list[Ids] = []
    for sample in samples:
        # copied only if it changes: the arrays of text samples are shared with their samples
        key = sample.token_ids[: count_inputs(sample)]
        keys.append(key.copy() if sample.images else key)
        for place in list_inputs(sample):
            n = place.end - place.begin
            name = place.image.hash, n, place.grid
            if name not in first:
                first[name], used = used, used + n
            # negative, so that no token id can equal them
            keys[-1][place.begin : place.end] = -1 - first[name] - np.arange(n)
    return keys


def fill_row(samples: Sequence[Sample], row: Row) -> tuple[Tensor, Tensor | None, tuple[EncodedImage, ...]]:
    """Return token ids [T], M-RoPE positions [3, T] and images in token order of a row laid out by keys.

    Positions are None if no image has a grid; the row's positions are then sufficient. A shared image occurs once.
    """
    images = [list_inputs(sample) for sample in samples]
    if not any(images):
        return torch.from_numpy(row.input_ids), None, ()  # the keys are the ids
    # imported here, since training on text works without modeling/images
    from modeling.images.rope_positions import find_rope_ids

    has_grids = any(place.grid is not None for places in images for place in places)
    ids, rope = np.empty_like(row.input_ids), np.empty((3, len(row.input_ids)), dtype=np.int64)
    placed: dict[int, EncodedImage] = {}
    for sample, own, where in zip(samples, images, row.places, strict=True):
        ids[where] = sample.token_ids[: len(where)]
        placed |= {int(where[place.begin]): place.image for place in own}
        if has_grids:
            # a shared prefix is written once per sample, each time with the same numbers
            rope[:, where] = find_rope_ids(len(where), own)
    in_order = tuple(placed[begin] for begin in sorted(placed))
    return torch.from_numpy(ids), torch.from_numpy(rope) if has_grids else None, in_order


def check_untrained(samples: Sequence[Sample]) -> None:
    """Raise ValueError for a trained image token, since no policy samples images."""
    for sample in samples:
        for place in sample.images:
            if sample.loss_mask[place.begin : place.end].any():
                raise ValueError(f"the sample of {sample.prompt.id!r} trains on the tokens of an image")


def find_trained(sample: Sample, chosen: Mask) -> tuple[slice | NDArray[np.intp], int]:
    """Return the inputs that predict the tokens of a mask, and their number. Input t predicts token t + 1."""
    return find_true(chosen[1 : count_inputs(sample) + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of each sample that predict chosen tokens."""

    chosen: list[slice | NDArray[np.intp]]
    counts: list[int]
    """Number of these inputs, by sample."""

    def select(self, per_sample: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Concatenate the values of the tokens that these inputs predict."""
        # [1:] is the shift: input t predicts token t + 1
        columns = pad_columns(per_sample)
        return np.concatenate([values[1:][chosen] for values, chosen in zip(columns, self.chosen, strict=True)])


def find_inputs(samples: Sequence[Sample], masks: Sequence[Mask]) -> Inputs:
    """Return the inputs that predict the tokens of each sample's mask."""
    found = [find_trained(s, mask) for s, mask in zip(samples, masks, strict=True)]
    return Inputs(chosen=[chosen for chosen, _ in found], counts=[n for _, n in found])


def pad_columns(per_sample: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
    """Return columns of several numbers per token, [L, K] each, with one K: -1 in the slots that were added."""
    widths = {values.shape[1:] for values in per_sample}
    if len(widths) <= 1:
        return per_sample
    width = max(width for (width,) in widths)
    return [np.pad(v, ((0, 0), (0, width - v.shape[1])), constant_values=-1.0) for v in per_sample]
