"""Images of a micro-batch as a model reads them: tensors on its device, made just before the forward pass.

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

from core.errors import RunStopped, UserError
from core.types.images import EncodedImage, PlacedImage, read_image
from core.types.samples import Batch
from modeling.images.processor import ImageProcessor
from modeling.images.rope_positions import find_rope_ids
from modeling.images.vision import parts_of


class MediaLoader:
    """Move batches to a model's device, and make the media of their images."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        *,
        device: str,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ):
        """Begin; `path` is the folder of the model, with its processor. A text model has none.

        dtype: dtype that the model computes in; None is that of its weights.
        """
        self.model: Any = model
        self.path, self.device, self.dtype = path, device, dtype or self.model.dtype
        self.processor: ImageProcessor | None = None
        if parts_of(model) is not None:
            self.processor = ImageProcessor(path, trust_remote_code=trust_remote_code)

    def load(self, batch: Batch) -> Batch:
        """Return the batch on the device, with the media of its images. Raises UserError for a text model's."""
        if self.processor is None:
            if batch.images:
                raise UserError(f"model.path={self.path} is a text model, and a sample has images")
            return batch.to(self.device)
        if not batch.images:
            batch = add_blank(batch, self.processor)
        self._check_tokens(batch, self.processor)
        media = self.processor.collate(batch.images)
        ready = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in media.items()}
        return replace(batch, media=ready).to(self.device)

    def _check_tokens(self, batch: Batch, processor: ImageProcessor) -> None:
        """Raise RunStopped unless every placeholder in the row is an image's: features fill them one after another."""
        token: int = self.model.config.image_token_id
        found = int((batch.input_ids == token).sum())
        wanted = sum(processor.expand(image).ids.count(token) for image in batch.images)
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
