"""Image families: how a model family writes an image as tokens, and joins tensors of several images.

The classes have the same attributes and methods; Tiles documents them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from core.errors import UserError
from core.types.images import ImageRefused

Tensors = dict[str, Tensor]
Grid = tuple[int, int]


class Tiles:
    """Idefics3 and SmolVLM: square tiles in sequence, followed by the whole image.

    Every tile is written as the same number of <image> tokens between marks.
    """

    settings: Mapping[str, Any] = {"return_row_col_info": True}
    """Arguments of the image processor."""
    around = ""
    """Text before and after the tokens. A tokenizer may join it with the text beside it."""

    def __init__(self, images: Any, tokenizer: Any, config: Any, processor: Mapping[str, Any], who: str):
        """processor: the settings of the model's processor."""
        self.images = images
        self.placeholder: str = getattr(tokenizer, "image_token", None) or "<image>"
        """Text of the token that the chat template writes for an image."""
        self.token = self.placeholder
        """Text of the token that a feature of the vision tower replaces."""
        self.mark: str = getattr(tokenizer, "fake_image_token", None) or "<fake_token_around_image>"
        self.whole: str = getattr(tokenizer, "global_image_token", None) or "<global-img>"
        rows = (f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
        self.reserved = (self.placeholder, self.mark, self.whole, *rows)
        """Tokens that represent only images; a tokenizer need not have all of them."""
        self.tokens: int = processor.get("image_seq_len", 169)
        patches = self.edge // config.vision_config.patch_size
        makes = patches**2 // config.scale_factor**2
        # features fill the tokens in order, so another number would shift every image behind the first
        if makes != self.tokens:
            raise UserError(
                f"{who}: its processor writes {self.tokens} tokens for a tile of {self.edge} pixels, and its model "
                f"makes {makes} of it: take config and processor of one model"
            )

    @property
    def edge(self) -> int:
        """Side of a tile in pixels."""
        return self.images.max_image_size["longest_edge"]

    def count(self, width: int, height: int) -> Grid:
        """Return the rows and columns into which an image of this size is cut. Raises ImageRefused."""
        # computed as transformers' processor does, which needs the pixels; ImageProcessor.process compares the results
        if not self.images.do_image_splitting:
            return 0, 0
        if self.images.do_resize:
            height, width = self._fit(height, width)
        # The longer side is stretched to whole tiles first, and the other one with it.
        ratio, edge = width / height, self.edge
        if width >= height:
            width = math.ceil(width / edge) * edge
            height = math.ceil(int(width / ratio) / edge) * edge
        else:
            height = math.ceil(height / edge) * edge
            width = math.ceil(int(height * ratio) / edge) * edge
        return (height // edge, width // edge) if max(height, width) > edge else (0, 0)

    def _fit(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

        size = self.images.size
        if not size["longest_edge"]:
            return size["height"], size["width"]
        # transformers' function takes an image, and reads only its shape
        of_that_size = np.broadcast_to(np.uint8(0), (3, height, width))  # takes no memory
        return get_resize_output_image_size(of_that_size, resolution_max_side=size["longest_edge"])

    def write(self, cut: Grid) -> str:
        """Return the text of the image's tokens."""
        rows, columns = cut
        tile = self.placeholder * self.tokens
        whole = f"{self.mark}{self.whole}{tile}{self.mark}"
        if not rows:
            return whole
        lines = [
            "".join(f"{self.mark}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + "\n" + whole

    def find_grid(self, cut: Grid) -> Grid | None:
        """Return rows and columns of the tokens, for families with three position axes."""
        return None

    def read(self, found: Mapping[str, Any]) -> tuple[Tensors, Grid]:
        """Return an image's tensors, and the processor's rows and columns."""
        tensors = {name: found[name][0] for name in ("pixel_values", "pixel_attention_mask") if name in found}
        if bool((tensors["pixel_values"] == 0).flatten(1).all(dim=1).any()):
            raise ImageRefused(
                "the model's processor makes zeros of the image or of a tile of it, which the model takes for padding"
            )
        return tensors, (int(found["rows"][0][0]), int(found["cols"][0][0]))

    def collate(self, each: Sequence[Tensors]) -> Tensors:
        """Join the tensors of a row's images."""
        sizes = [tuple(one["pixel_values"].shape[-2:]) for one in each]
        height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
        pixels = [_pad_to(one["pixel_values"], height, width) for one in each]
        joined = {"pixel_values": torch.cat(pixels)[None]}
        if len({*sizes}) > 1 or any("pixel_attention_mask" in one for one in each):
            masks = [one.get("pixel_attention_mask", _all_seen(one["pixel_values"])) for one in each]
            # the mask tells padding from black pixels: without one the model would attend to it
            joined["pixel_attention_mask"] = torch.cat([_pad_to(mask, height, width) for mask in masks])[None]
        return joined


def _pad_to(tiles: Tensor, height: int, width: int) -> Tensor:
    """Return tiles [n, ..., h, w] of another size, with zeros below and to the right."""
    return pad(tiles, (0, width - tiles.shape[-1], 0, height - tiles.shape[-2]))


def _all_seen(tiles: Tensor) -> Tensor:
    return torch.ones(tiles.shape[0], *tiles.shape[-2:], dtype=torch.long)


class Patches:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: an image is cut into patches, and each square of them is one token.

    The tokens keep rows and columns of the image, from which their positions are made.
    """

    settings: Mapping[str, Any] = {}
    around = ""

    def __init__(self, images: Any, tokenizer: Any, config: Any, processor: Mapping[str, Any], who: str):
        self.images = images
        self.placeholder: str = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        self.token = self.placeholder
        self.reserved = (self.placeholder, getattr(tokenizer, "video_token", None) or "<|video_pad|>")
        vision = config.vision_config
        wanted = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        wanted["temporal_patch_size"] = vision.temporal_patch_size
        for name, value in wanted.items():
            # otherwise the number of tokens would not be the number of features
            if getattr(images, name) != value:
                raise UserError(
                    f"{who}: its processor has {name}={getattr(images, name)}, and its model {value}: take config and "
                    "processor of one model"
                )

    def count(self, width: int, height: int) -> Grid:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        patch = self.images.patch_size
        if self.images.do_resize:
            size = self.images.size
            try:
                height, width = smart_resize(
                    height,
                    width,
                    factor=patch * self.images.merge_size,
                    min_pixels=size["shortest_edge"],
                    max_pixels=size["longest_edge"],
                )
            except ValueError as error:
                raise ImageRefused(f"the model's processor refuses the image ({error})") from error
        return height // patch, width // patch

    def write(self, cut: Grid) -> str:
        rows, columns = self.find_grid(cut)
        return self.placeholder * (rows * columns)

    def find_grid(self, cut: Grid) -> Grid:
        return cut[0] // self.images.merge_size, cut[1] // self.images.merge_size

    def read(self, found: Mapping[str, Any]) -> tuple[Tensors, Grid]:
        _, rows, columns = found["image_grid_thw"][0].tolist()
        return {name: found[name] for name in ("pixel_values", "image_grid_thw")}, (rows, columns)

    def collate(self, each: Sequence[Tensors]) -> Tensors:
        return join_tensors(each)


def join_tensors(each: Sequence[Tensors]) -> Tensors:
    """Join the tensors of images along their first axis. All images have the same tensors."""
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}
