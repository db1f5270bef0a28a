"""Inputs of a forward pass: the tokens of a sample to compute, and the keys for prefix sharing.

For text, token ids decide both. Samples with images follow data_feeds/images/row_images.py.
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
    """Return the number of input tokens of a sample. For text, all but the last token, which predicts nothing."""
    if not sample.images:
        return len(sample.token_ids) - 1
    # imported here, since training on text works without data_feeds/images
    from data_feeds.images import row_images

    return row_images.count_inputs(sample)


def make_keys(samples: Sequence[Sample]) -> list[Ids]:
    """Return each sample's input tokens as keys. Samples may share tokens as far as their keys agree."""
    if not hold_images(samples):
        return [sample.token_ids[: count_inputs(sample)] for sample in samples]
    from data_feeds.images import row_images

    return row_images.make_keys(samples)


def fill_row(samples: Sequence[Sample], row: Row) -> tuple[Tensor, Tensor | None, tuple[EncodedImage, ...]]:
    """Return token ids [T], M-RoPE positions [3, T] and images of a row laid out by keys.

    Positions are None if no image has a grid; the row's positions are then sufficient.
    """
    if not hold_images(samples):
        return torch.from_numpy(row.input_ids), None, ()  # the keys are the ids
    from data_feeds.images import row_images

    return *row_images.fill_row(samples, row), row_images.order_images(samples, row.places)


def check_untrained(samples: Sequence[Sample]) -> None:
    """Raise ValueError for a trained image token, since no policy samples images."""
    for sample in samples:
        for place in sample.images:
            if sample.loss_mask[place.begin : place.end].any():
                raise ValueError(f"the sample of {sample.prompt.id!r} trains on the tokens of an image")


def hold_images(samples: Sequence[Sample]) -> bool:
    return any(sample.images for sample in samples)
