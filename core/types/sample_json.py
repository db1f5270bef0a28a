"""Samples as JSON: their pictures lie elsewhere, each once, and messages and spans name them by their hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from core.types.images import Picture, PlacedPicture
from core.types.messages import Message, find_pictures
from core.types.samples import Sample


def collect_pictures(samples: Iterable[Sample]) -> dict[str, Picture]:
    """Return every picture that samples see, or that their messages hold, by its hash."""
    found: dict[str, Picture] = {}
    for sample in samples:
        found |= {place.picture.hash: place.picture for place in sample.pictures}
        found |= {p.hash: p for p in find_pictures([*sample.prompt.messages, *sample.transcript])}
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
    """Return the messages that core.types.messages.describe_messages described."""
    return [cast(Message, _restore_message(message, pictures)) for message in described]


def _restore_message(message: dict[str, Any], pictures: Mapping[str, Picture]) -> dict[str, Any]:
    if "parts" not in message:
        return message
    parts = [
        {"type": "image", "image": pictures[part["sha256"]]} if part["type"] == "image" else part
        for part in message["parts"]
    ]
    return {**message, "parts": parts}
