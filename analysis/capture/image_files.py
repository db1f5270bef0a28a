"""The pictures of a captured step: pictures/<hash> in a capsule, each once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.types.images import Picture, read_picture
from core.types.sample_json import collect_pictures
from core.types.samples import Sample

PICTURES = "pictures"


def write_pictures(folder: Path, samples: Sequence[Sample]) -> None:
    """Write every picture that samples see, or that their messages hold."""
    found = collect_pictures(samples)
    if found:
        (folder / PICTURES).mkdir(exist_ok=True)
    for name, picture in found.items():
        (folder / PICTURES / name).write_bytes(picture.data)


def read_pictures(folder: Path) -> dict[str, Picture]:
    """Return the pictures by their hash. Raises ValueError for one that is not what its name says."""
    there = sorted((folder / PICTURES).iterdir()) if (folder / PICTURES).is_dir() else []
    found = {path.name: read_picture(path.read_bytes()) for path in there}
    if wrong := [name for name, picture in found.items() if picture.hash != name]:
        raise ValueError(f"{PICTURES}/{wrong[0]} holds another picture")
    return found
