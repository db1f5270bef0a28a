"""Media of a micro-batch: image tensors on the model's device, created just before the forward pass.

A vision-language model runs its vision tower in every forward pass, on the batch's images or on a blank image. So every
rank makes the same collectives whatever its samples, and every parameter gets a gradient (zero for the blank).
"""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import RunStopped
from core.types.images import EncodedImage, PlacedImage, read_image
from core.types.samples import Batch
from modeling.images.processor import ImageProcessor
from modeling.images.rope_positions import find_rope_ids


class ImageMedia:
    """Media of the images of batches, for a vision-language model."""

    def __init__(self, model: nn.Module, path: str, *, dtype: torch.dtype, trust_remote_code: bool = False):
        """Load the image processor of the model folder `path`. dtype: dtype of the model's computation."""
        self.model: Any = model
        self.dtype = dtype
        self.processor = ImageProcessor(path, trust_remote_code=trust_remote_code)

    def add_media(self, batch: Batch) -> Batch:
        """Return the batch with the media of its images, or of a blank image."""
        if not batch.images:
            batch = add_blank(batch, self.processor)
        self._check_tokens(batch)
        media = self.processor.collate(batch.images)
        # whole numbers are sizes and grids, not pixels
        ready = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in media.items()}
        return replace(batch, media=ready)

    def _check_tokens(self, batch: Batch) -> None:
        """Raise RunStopped unless placeholders match the images exactly, since features fill them in order."""
        token: int = self.model.config.image_token_id
        found = int((batch.input_ids == token).sum())
        wanted = sum(self.processor.expand(image).ids.count(token) for image in batch.images)
        if found != wanted:
            raise RunStopped(
                f"a micro-batch holds {found} tokens that stand for images, and its {len(batch.images)} images "
                f"fill {wanted}: a sample's tokens do not fit its images"
            )


def add_blank(batch: Batch, processor: ImageProcessor) -> Batch:
    """Append a sequence of a blank image to the batch, without trained tokens."""
    blank = make_blank()
    expansion = processor.expand(blank)
    n = len(expansion.ids)

    def append(old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([old, new.to(old.dtype)])

    # Text has the same position on all three axes, so position_ids serve for the samples.
    rope: Tensor | None = None
    if expansion.grid is not None:
        own = find_rope_ids(n, [PlacedImage(image=blank, begin=0, end=n, grid=expansion.grid)])
        rope = torch.cat([batch.position_ids.expand(3, -1), torch.from_numpy(own)], dim=1)
    return replace(
        batch,
        input_ids=append(batch.input_ids, torch.tensor(expansion.ids)),
        position_ids=append(batch.position_ids, torch.arange(n)),
        segment_ids=append(batch.segment_ids, torch.full((n,), len(batch.parents))),
        parents=append(batch.parents, torch.tensor([-1])),
        lengths=append(batch.lengths, torch.tensor([n])),
        images=(blank,),
        rope_ids=rope,
    )


@cache
def make_blank() -> EncodedImage:
    """Return a small grey image."""
    from PIL import Image

    file = io.BytesIO()
    # grey and not black: a tile of zeros would count as padding (families.Tiles.read)
    Image.new("RGB", (32, 32), (96, 96, 96)).save(file, format="PNG")
    return read_image(file.getvalue())
