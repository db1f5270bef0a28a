"""Inputs of a forward pass: which tokens of a sample it reads, and which of them samples may share.

Of text the token ids decide both. Samples with images have rules of their own, in data_feeds/images/row_images.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.types.arrays import Ids
from core.types.images import EncodedImage
from core.types.samples import Sample
from data_feeds.packing.prefix_tree import Row


def count_inputs(sample: Sample) -> int:
    """Return how many tokens of a sample a forward pass reads: of text all but the last, which predicts nothing."""
    if not sample.images:
        return len(sample.token_ids) - 1
    from data_feeds.images import row_images

    return row_images.count_inputs(sample)


def make_keys(samples: Sequence[Sample]) -> list[Ids]:
    """Return the keys of each sample's input tokens: two samples may share a token where their keys agree up to it."""
    if not hold_images(samples):
        return [sample.token_ids[: count_inputs(sample)] for sample in samples]
    from data_feeds.images import row_images

    return row_images.make_keys(samples)


def fill_row(samples: Sequence[Sample], row: Row) -> tuple[Tensor, Tensor | None, tuple[EncodedImage, ...]]:
    """Return token ids [T], M-RoPE positions [3, T] and images of a row that was laid out by keys.

    The positions are None where no image has a grid: those of the row are enough.
    """
    if not hold_images(samples):
        return torch.from_numpy(row.input_ids), None, ()  # the keys are the ids
    from data_feeds.images import row_images

    return *row_images.fill_row(samples, row), row_images.order_images(samples, row.places)


def check_untrained(samples: Sequence[Sample]) -> None:
    """Raise ValueError for an image's token that is trained on: an image is given, and no policy chooses it."""
    for sample in samples:
        for place in sample.images:
            if sample.loss_mask[place.begin : place.end].any():
                raise ValueError(f"the sample of {sample.prompt.id!r} trains on the tokens of an image")


def hold_images(samples: Sequence[Sample]) -> bool:
    return any(sample.images for sample in samples)
