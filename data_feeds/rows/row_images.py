"""Open the images of a source, if it has any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.loading import needs_part
from data_feeds.rows.sources import find_folder

if TYPE_CHECKING:
    from data_feeds.images.read_images import ImageReader


def open_images(key: str, path: str, max_pixels: int) -> ImageReader:
    """Return the loader of the images of a source. key: that of the recipe, with the path, for error messages."""
    # imported here, since rows of text work without data_feeds/images
    with needs_part(f"{key}, which holds images,", otherwise="leave its images out"):
        from data_feeds.images.read_images import ImageReader

    return ImageReader(folder=find_folder(path), max_pixels=max_pixels, max_pixels_key="data.max_image_pixels")
