"""Image tokens of a conversation: placeholders in the text are expanded, and located again in the ids.

A template writes one placeholder per image. It is expanded in the text, before encoding. So all code that splits,
compares and encodes texts works on the tokens of the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from core.types.images import EncodedImage, ImageRefused, PlacedImage
from core.types.messages import Message, ToolSpec
from data_feeds.chat.template_append import ImagesDoNotFit
from modeling.images.processor import Expansion, ImageProcessor


class ImageWriter:
    """Writer of images: expands placeholders in rendered text, and locates image tokens among ids."""

    def __init__(self, processor: ImageProcessor):
        self.processor = processor

    def check_texts(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Raise ImagesDoNotFit for a text that contains a reserved image token."""
        tokens = re.compile("|".join(map(re.escape, self.processor.reserved)))
        for message in messages:
            texts = [message["content"], message.get("reasoning", ""), str(message.get("tool_calls", ""))]
            if found := tokens.search("\n".join(texts)):
                raise ImagesDoNotFit(
                    f"a text holds {found.group()!r}, which stands for an image in this model: write an image as a "
                    "part {type: image}"
                )
        if tools and (found := tokens.search(str(tools))):
            raise ImagesDoNotFit(f"a tool holds {found.group()!r}, which stands for an image in this model")

    def insert_tokens(self, text: str, images: Sequence[EncodedImage]) -> str:
        """Replace each placeholder in a rendered text by the tokens of its image."""
        pieces = text.split(self.processor.placeholder)
        if len(pieces) - 1 != len(images):
            raise ImagesDoNotFit(
                f"the chat template writes {len(pieces) - 1} times {self.processor.placeholder!r} for {len(images)} "
                "images: use a model or a template that writes every image once"
            )
        whole = pieces[0]
        for image, after in zip(images, pieces[1:], strict=True):
            whole += self._expand(image).text + after
        return whole

    def count_tokens(self, images: Sequence[EncodedImage]) -> int:
        """Return the number of image tokens. Raises ImagesDoNotFit for an image that the model cannot process."""
        return sum(len(self._expand(image).ids) for image in images)

    def place_images(self, ids: Sequence[int], images: Sequence[EncodedImage], begin: int) -> tuple[PlacedImage, ...]:
        """Return the token spans of images in ids, from `begin` on. Raises ImagesDoNotFit if they do not match."""
        stands_for_some = np.isin(np.asarray(ids[begin:], dtype=np.int64), list(self.processor.placeholder_ids))
        waiting = np.flatnonzero(stands_for_some) + begin
        places: list[PlacedImage] = []
        for image in images:
            if not len(waiting):
                raise ImagesDoNotFit(f"there are tokens of {len(places)} images, and {len(images)} images")
            expansion = self._expand(image)
            first = int(waiting[0])
            end = first + len(expansion.ids)
            # the tokens depend on the size of the image, so a mismatch means another image or other settings
            if tuple(ids[first:end]) != expansion.ids:
                raise ImagesDoNotFit(
                    f"the tokens from {first} on are not those of image {len(places) + 1} of {len(images)}, which has "
                    f"{image.width} x {image.height} pixels"
                )
            places.append(PlacedImage(image, first, end, expansion.grid))
            waiting = waiting[waiting >= end]
        if len(waiting):
            raise ImagesDoNotFit(
                f"token {int(waiting[0])} stands for an image, and there are only {len(images)} images before it"
            )
        return tuple(places)

    def _expand(self, image: EncodedImage) -> Expansion:
        try:
            return self.processor.expand(image)
        except ImageRefused as refusal:
            raise ImagesDoNotFit(str(refusal)) from refusal
