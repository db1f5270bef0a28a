"""The pictures of a captured step: pictures/<hash> in a capsule, each once; messages and spans name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from core.messages import Message, find_pictures
from core.pictures import Picture, PlacedPicture, read_picture
from core.types import Sample

PICTURES = "pictures"


def write_pictures(folder: Path, samples: Sequence[Sample]) -> None:
    """Write every picture that samples see, or that their messages hold."""
    found = {place.picture.hash: place.picture for sample in samples for place in sample.pictures}
    for sample in samples:
        found |= {p.hash: p for p in find_pictures([*sample.prompt.messages, *sample.transcript])}
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


def describe_places(places: Sequence[PlacedPicture]) -> list[list[Any]]:
    """Return where pictures stand, as JSON."""
    return [[place.picture.hash, place.begin, place.end, place.grid] for place in places]


def restore_places(described: Sequence[Sequence[Any]], pictures: Mapping[str, Picture]) -> tuple[PlacedPicture, ...]:
    """Return what `describe_places` described."""
    return tuple(
        PlacedPicture(pictures[name], begin, end, None if grid is None else (grid[0], grid[1]))
        for name, begin, end, grid in described
    )


def restore_messages(described: Sequence[dict[str, Any]], pictures: Mapping[str, Picture]) -> list[Message]:
    """Return the messages that core.messages.describe_messages described."""
    return [cast(Message, _restore_message(message, pictures)) for message in described]


def _restore_message(message: dict[str, Any], pictures: Mapping[str, Picture]) -> dict[str, Any]:
    if "parts" not in message:
        return message
    parts = [
        {"type": "image", "image": pictures[part["sha256"]]} if part["type"] == "image" else part
        for part in message["parts"]
    ]
    return {**message, "parts": parts}
