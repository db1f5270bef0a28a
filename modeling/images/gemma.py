"""Image families of Gemma: soft tokens between a token of beginning and one of end.

The classes have the attributes and methods of families.Tiles. Tokens of an image attend to each other in both
directions (modeling/image_blocks.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import UserError
from core.types.images import ImageRefused
from modeling.images.families import Grid, Tensors, join_tensors


class Squares:
    """Gemma 3: every image is a square of the same size, and the same number of tokens."""

    # Crops of long images (pan and scan) would be more images than the template has places.
    settings: Mapping[str, Any] = {"do_pan_and_scan": False}
    around = "\n\n"

    def __init__(self, images: Any, tokenizer: Any, config: Any, processor: Mapping[str, Any], who: str):
        self.images = images
        self.placeholder: str = getattr(tokenizer, "boi_token", None) or "<start_of_image>"
        self.token: str = getattr(tokenizer, "image_token", None) or "<image_soft_token>"
        self.end: str = getattr(tokenizer, "eoi_token", None) or "<end_of_image>"
        self.reserved = (self.placeholder, self.token, self.end)
        self.tokens: int = processor.get("image_seq_length", 256)
        wanted = config.mm_tokens_per_image, config.vision_config.image_size
        if (self.tokens, images.size["height"]) != wanted or images.size["width"] != wanted[1]:
            raise UserError(
                f"{who}: its processor makes {self.tokens} tokens of an image of {images.size['height']} x "
                f"{images.size['width']} pixels, and its model takes {wanted[0]} of {wanted[1]} x {wanted[1]}: take "
                "config and processor of one model"
            )
        # an engine reads the file itself
        if images.do_pan_and_scan:
            raise UserError(
                f"{who}: its processor cuts crops out of long images (pan and scan), which is not supported: set "
                "do_pan_and_scan to false in its preprocessor_config.json"
            )

    def count(self, width: int, height: int) -> Grid:
        return 1, self.tokens

    def write(self, cut: Grid) -> str:
        return f"{self.placeholder}{self.token * (cut[0] * cut[1])}{self.end}"

    def find_grid(self, cut: Grid) -> Grid | None:
        return None

    def read(self, found: Mapping[str, Any]) -> tuple[Tensors, Grid]:
        return {"pixel_values": found["pixel_values"]}, (1, self.tokens)

    def collate(self, each: Sequence[Tensors]) -> Tensors:
        return join_tensors(each)


class Pools:
    """Gemma 4: an image keeps its proportions, and each square of patches is pooled to a token."""

    settings: Mapping[str, Any] = {}
    around = ""

    def __init__(self, images: Any, tokenizer: Any, config: Any, processor: Mapping[str, Any], who: str):
        self.images = images
        self.placeholder: str = getattr(tokenizer, "image_token", None) or "<|image|>"
        self.token = self.placeholder
        self.begin: str = getattr(tokenizer, "boi_token", None) or "<|image>"
        self.end: str = getattr(tokenizer, "eoi_token", None) or "<image|>"
        others = ("<|video|>", getattr(tokenizer, "audio_token", None) or "<|audio|>")
        self.reserved = (self.placeholder, self.begin, self.end, *others)
        for name in ("patch_size", "pooling_kernel_size"):
            if (found := getattr(images, name)) != (wanted := getattr(config.vision_config, name)):
                raise UserError(
                    f"{who}: its processor has {name}={found}, and its model {wanted}: take config and processor of "
                    "one model"
                )

    def count(self, width: int, height: int) -> Grid:
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        pool, patch = self.images.pooling_kernel_size, self.images.patch_size
        if self.images.do_resize:
            try:
                height, width = get_aspect_ratio_preserving_size(
                    height, width, patch, self.images.max_soft_tokens * pool**2, pool
                )
            except ValueError as error:
                raise ImageRefused(f"the model's processor refuses the image ({error})") from error
        return height // patch // pool, width // patch // pool

    def write(self, cut: Grid) -> str:
        return f"{self.begin}{self.token * (cut[0] * cut[1])}{self.end}"

    def find_grid(self, cut: Grid) -> Grid | None:
        # positions within an image belong to the tower, and its tokens have those of text
        return None

    def read(self, found: Mapping[str, Any]) -> tuple[Tensors, Grid]:
        tensors = {name: found[name] for name in ("pixel_values", "image_position_ids")}
        columns, rows = (tensors["image_position_ids"][0].amax(0) + 1).tolist()  # (x, y) of patches, -1 for padding
        pool = self.images.pooling_kernel_size
        return tensors, (rows // pool, columns // pool)

    def collate(self, each: Sequence[Tensors]) -> Tensors:
        return join_tensors(each)
