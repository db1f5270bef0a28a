"""The images of a captured step: images/<hash> in a snapshot, each once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.types.images import EncodedImage, read_image
from core.types.sample_json import collect_images
from core.types.samples import Sample

IMAGES = "images"


def write_images(folder: Path, samples: Sequence[Sample]) -> None:
    """Write every image that samples see, or that their messages hold."""
    found = collect_images(samples)
    if found:
        (folder / IMAGES).mkdir(exist_ok=True)
    for name, image in found.items():
        (folder / IMAGES / name).write_bytes(image.data)


def read_images(folder: Path) -> dict[str, EncodedImage]:
    """Return the images by their hash. Raises ValueError if an image does not match the hash in the file name."""
    there = sorted((folder / IMAGES).iterdir()) if (folder / IMAGES).is_dir() else []
    found = {path.name: read_image(path.read_bytes()) for path in there}
    if wrong := [name for name, image in found.items() if image.hash != name]:
        raise ValueError(f"{IMAGES}/{wrong[0]} holds another image")
    return found
