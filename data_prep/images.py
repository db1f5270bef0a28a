"""Common functions of scripts for data sets with images."""

from __future__ import annotations

from pathlib import Path

from core.types.images import LARGEST_SIDE, EncodedImage
from core.types.messages import Message
from data_feeds.images.read_images import ImageReader


def make_reader(folder: Path | None = None) -> ImageReader:
    """Return an image loader without a size limit, since the recipe sets one. `folder`: base of relative paths."""
    return ImageReader(folder=folder, max_pixels=LARGEST_SIDE**2, max_pixels_key="the largest size")


def ask_about(image: EncodedImage, question: str) -> Message:
    """Return a user turn with an image and a question."""
    # `content` must be the text of the parts, for code that reads no images
    parts: Message = {"role": "user", "content": question}
    parts["parts"] = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return parts
