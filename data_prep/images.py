"""What scripts for data sets with images share."""

from __future__ import annotations

from pathlib import Path

from core.types.images import LARGEST_SIDE, EncodedImage
from core.types.messages import Message
from data_feeds.images.read_images import ImageReader


def make_reader(folder: Path | None = None) -> ImageReader:
    """Return a reader that leaves it to the recipe which images are too large; paths go out from `folder`."""
    return ImageReader(folder=folder, max_pixels=LARGEST_SIDE**2, max_pixels_key="the largest size")


def ask_about(image: EncodedImage, question: str) -> Message:
    """Return the user's turn that shows an image and asks about it."""
    parts: Message = {"role": "user", "content": question}
    parts["parts"] = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return parts
