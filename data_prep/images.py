"""What scripts for data sets with pictures share."""

from __future__ import annotations

from pathlib import Path

from core.types.images import LARGEST_SIDE, Picture
from core.types.messages import Message
from data_feeds.images.read_images import PictureReader


def make_reader(folder: Path | None = None) -> PictureReader:
    """Return a reader that leaves it to the recipe which pictures are too large; paths go out from `folder`."""
    return PictureReader(folder=folder, max_pixels=LARGEST_SIDE**2, max_pixels_key="the largest size")


def ask_about(picture: Picture, question: str) -> Message:
    """Return the user's turn that shows a picture and asks about it."""
    parts: Message = {"role": "user", "content": question}
    parts["parts"] = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return parts
