"""Samples as JSON; messages and spans refer to images by hash, and images are stored separately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from core.types.images import EncodedImage, PlacedImage
from core.types.messages import Message, find_images
from core.types.samples import Sample


def collect_images(samples: Iterable[Sample]) -> dict[str, EncodedImage]:
    """Collect the images of samples and their messages, by hash."""
    found: dict[str, EncodedImage] = {}
    for sample in samples:
        found |= {place.image.hash: place.image for place in sample.images}
        found |= {p.hash: p for p in find_images([*sample.prompt.messages, *sample.transcript])}
    return found


def describe_places(places: Sequence[PlacedImage]) -> list[list[Any]]:
    """Describe image spans as JSON."""
    return [[place.image.hash, place.begin, place.end, place.grid] for place in places]


def restore_places(described: Sequence[Sequence[Any]], images: Mapping[str, EncodedImage]) -> tuple[PlacedImage, ...]:
    """Invert `describe_places`."""
    return tuple(
        PlacedImage(images[name], begin, end, None if grid is None else (grid[0], grid[1]))
        for name, begin, end, grid in described
    )


def restore_messages(described: Sequence[dict[str, Any]], images: Mapping[str, EncodedImage]) -> list[Message]:
    """Invert core.types.messages.describe_messages."""
    return [cast(Message, _restore_message(message, images)) for message in described]


def _restore_message(message: dict[str, Any], images: Mapping[str, EncodedImage]) -> dict[str, Any]:
    if "parts" not in message:
        return message
    parts = [
        {"type": "image", "image": images[part["sha256"]]} if part["type"] == "image" else part
        for part in message["parts"]
    ]
    return {**message, "parts": parts}
