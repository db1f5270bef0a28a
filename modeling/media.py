"""Move batches to a model's device, and add the media of their images (modeling/images/media.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from core.errors import UserError
from core.types.samples import Batch
from modeling.hf_config import vision_family

if TYPE_CHECKING:
    from modeling.images.media import ImageMedia


class MediaLoader:
    """Move batches to a model's device; for a vision-language model, add the media of their images."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        *,
        device: str,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ):
        """Load the image processor of a vision-language model from the model folder `path`.

        dtype: dtype of the model's computation; None: that of the weights.
        """
        self.path, self.device = path, device
        self.images: ImageMedia | None = None
        own: Any = model
        if vision_family(own.config) is not None:
            # imported here, since text models work without modeling/images
            from modeling.images.media import ImageMedia

            self.images = ImageMedia(model, path, dtype=dtype or own.dtype, trust_remote_code=trust_remote_code)

    def load(self, batch: Batch) -> Batch:
        """Return the batch on the device, with the media of its images. Raises UserError for images of a text model."""
        if self.images is not None:
            batch = self.images.add_media(batch)
        elif batch.images:
            raise UserError(f"model.path={self.path} is a text model, or used as one here, and a sample has images")
        return batch.to(self.device)
