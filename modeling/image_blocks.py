"""Attention in both directions among the tokens of an image, as in Gemma 3 and in large models of Gemma 4.

transformers makes a mask from the types of the tokens. The kernel of packed rows (modeling/attention.py) takes the end
of each token's image instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBlocks:
    """Image tokens of a model that attend to each other in both directions."""

    token: int
    types: str
    """Model input with a 1 for every such token, from which transformers makes the mask."""
    in_windows_only: bool
    """Whether layers without a sliding window are causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEnds:
    """Ends of the images of some rows, for the attention kernel."""

    ends: Tensor
    """[B * T] int64 on the CPU: last token of the image that a token belongs to, else the token itself."""
    in_windows_only: bool

    def for_layer(self, window: int | None) -> Tensor | None:
        """Return the ends, or None for a layer that is causal."""
        return None if self.in_windows_only and window is None else self.ends


def find_image_blocks(config: Any) -> ImageBlocks | None:
    """Return the image tokens that attend in both directions, by the model's config; None if attention is causal."""
    text = config.get_text_config()
    if config.model_type == "gemma3":
        return ImageBlocks(token=config.image_token_id, types="token_type_ids", in_windows_only=False)
    if config.model_type == "gemma4" and text.use_bidirectional_attention == "vision":
        return ImageBlocks(token=config.image_token_id, types="mm_token_type_ids", in_windows_only=True)
    return None


def mark_types(blocks: ImageBlocks, input_ids: Tensor) -> dict[str, Tensor]:
    """Return the model input with the types of the tokens."""
    return {blocks.types: (input_ids == blocks.token).long()}


def find_ends(blocks: ImageBlocks, input_ids: Tensor, sequences: Tensor) -> ImageEnds | None:
    """Return the ends of the images in flat tokens [N] of sequences [N]; None if no token is an image's."""
    # The device is waited for: masks depend on where the images are.
    is_image, sequences = (input_ids == blocks.token).cpu(), sequences.cpu()
    if not is_image.any():
        return None
    goes_on = is_image[:-1] & is_image[1:] & (sequences[:-1] == sequences[1:])
    places = torch.arange(len(is_image))
    # at a token that goes on, the end is that of the next token
    ends = torch.where(torch.nn.functional.pad(goes_on, (0, 1)), len(places), places).flip(0).cummin(0).values.flip(0)
    return ImageEnds(ends=ends, in_windows_only=blocks.in_windows_only)
