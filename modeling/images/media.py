"""Images of a micro-batch as a model reads them: tensors, made just before the forward pass.

A model that sees runs its vision part in every forward pass, on images or on one blank image beside the samples: so
every rank makes the same collectives, whichever samples it got, and every parameter gets a gradient, of zero there.
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
    """Media of the images of batches, for one model that sees."""

    def __init__(self, model: nn.Module, path: str, *, dtype: torch.dtype, trust_remote_code: bool = False):
        """Begin; `path` is the folder of the model, with its processor. dtype: dtype that the model computes in."""
        self.model: Any = model
        self.dtype = dtype
        self.processor = ImageProcessor(path, trust_remote_code=trust_remote_code)

    def add_media(self, batch: Batch) -> Batch:
        """Return the batch with the media of its images, or of a blank one."""
        if not batch.images:
            batch = add_blank(batch, self.processor)
        self._check_tokens(batch)
        media = self.processor.collate(batch.images)
        ready = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in media.items()}
        return replace(batch, media=ready)

    def _check_tokens(self, batch: Batch) -> None:
        """Raise RunStopped unless every placeholder in the row is an image's: features fill them one after another."""
        token: int = self.model.config.image_token_id
        found = int((batch.input_ids == token).sum())
        wanted = sum(self.processor.expand(image).ids.count(token) for image in batch.images)
        if found != wanted:
            raise RunStopped(
                f"a micro-batch holds {found} tokens that stand for images, and its {len(batch.images)} images "
                f"fill {wanted}: a sample's tokens do not fit its images"
            )


def add_blank(batch: Batch, processor: ImageProcessor) -> Batch:
    """Return the batch with one sequence more, which is a blank image; nothing of it is trained on."""
    blank = make_blank()
    done = processor.process(blank)
    n = len(done.ids)

    def append(old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([old, new.to(old.dtype)])

    rope: Tensor | None = None
    if done.grid is not None:
        own = find_rope_ids(n, [PlacedImage(image=blank, begin=0, end=n, grid=done.grid)])
        rope = torch.cat([batch.position_ids.expand(3, -1), torch.from_numpy(own)], dim=1)
    return replace(
        batch,
        input_ids=append(batch.input_ids, torch.tensor(done.ids)),
        position_ids=append(batch.position_ids, torch.arange(n)),
        segment_ids=append(batch.segment_ids, torch.full((n,), len(batch.parents))),
        parents=append(batch.parents, torch.tensor([-1])),
        images=(blank,),
        rope_ids=rope,
    )


@cache
def make_blank() -> EncodedImage:
    """Return a small grey image."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 32), (96, 96, 96)).save(file, format="PNG")
    return read_image(file.getvalue())
