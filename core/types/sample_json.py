"""Samples as JSON; messages and spans refer to images by hash, and images are stored separately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from core.types.arrays import from_json, list_fields, to_json
from core.types.images import EncodedImage, PlacedImage
from core.types.kept_sets import KeptSets
from core.types.messages import Message, describe_messages, find_images
from core.types.routes import describe_routes, restore_routes
from core.types.samples import Group, Prompt, Sample, make_sample


def collect_images(samples: Iterable[Sample]) -> dict[str, EncodedImage]:
    """Collect the images of samples and their messages, by hash."""
    found: dict[str, EncodedImage] = {}
    for sample in samples:
        found |= {place.image.hash: place.image for place in sample.images}
        found |= {p.hash: p for p in find_images([*sample.prompt.messages, *sample.transcript])}
    return found


def describe_group(group: Group) -> dict[str, Any]:
    """Describe a group as JSON. Of a prompt it has the messages and tools that the policy read, each form once."""
    prompts: list[list[Any]] = []
    samples: list[dict[str, Any]] = []
    for sample in group:
        shown = [describe_messages(sample.prompt.messages), sample.prompt.tools]
        if shown not in prompts:
            prompts.append(shown)
        samples.append(_describe_sample(sample) | {"prompt": prompts.index(shown)})
    return {"prompts": prompts, "group": samples}


def restore_group(described: Mapping[str, Any], prompt: Prompt, images: Mapping[str, EncodedImage]) -> Group:
    """Invert `describe_group`. prompt: the row of the group."""
    if "prompts" not in described:  # a checkpoint of an earlier version, whose samples have the row as it is
        as_drawn: dict[str, Any] = {"prompt": prompt}
        return [make_sample(**_restore_sample(s, images) | as_drawn) for s in described["group"]]
    prompts = [
        replace(prompt, messages=restore_messages(messages, images), tools=tools, recorded=())
        for messages, tools in described["prompts"]
    ]
    return [make_sample(**_restore_sample(s, images) | {"prompt": prompts[s["prompt"]]}) for s in described["group"]]


def _describe_sample(sample: Sample) -> dict[str, Any]:
    """Return a sample without the prompt, for JSON. Images are named by hash."""
    kept = None if sample.kept is None else {"ids": sample.kept.ids, "offsets": sample.kept.offsets}
    messages = describe_messages(sample.transcript)
    named = {"transcript": messages, "images": describe_places(sample.images), "kept": kept}
    if sample.routes is not None:
        named["routes"] = describe_routes(sample.routes)
    fields = {name: getattr(sample, name) for name in list_fields(Sample) if name != "prompt"}
    return {name: to_json(value) for name, value in (fields | named).items()}


def _restore_sample(described: Mapping[str, Any], images: Mapping[str, EncodedImage]) -> dict[str, Any]:
    """Restore the fields of `_describe_sample`, by name."""
    found: dict[str, Any] = from_json(described)
    found["transcript"] = restore_messages(found["transcript"], images)
    found["images"] = restore_places(found["images"], images)
    if found.get("kept") is not None:
        found["kept"] = KeptSets(**found["kept"])
    if found.get("routes") is not None:
        found["routes"] = restore_routes(found["routes"])
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
