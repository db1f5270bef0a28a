"""Pictures in a conversation: placeholders in its text become the tokens of the pictures, whose places are found again.

A template writes one placeholder for a picture. It is replaced in the text, before that is encoded, so that everything
that cuts, compares and encodes texts has the tokens that the model gets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from core.types.images import Picture, PictureRefused, PlacedPicture
from core.types.messages import Message, Part, ToolSpec
from data_feeds.chat.template_append import TemplateRefuses
from modeling.images.processor import Expansion, PictureProcessor


class PicturesDoNotFit(TemplateRefuses):
    """Error of a conversation whose text does not have one placeholder for each picture."""


def check_texts(processor: PictureProcessor, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
    """Raise PicturesDoNotFit for a text that holds a token which stands for pictures."""
    tokens = re.compile("|".join(map(re.escape, processor.reserved)))
    for message in messages:
        texts = [message["content"], message.get("reasoning", ""), str(message.get("tool_calls", ""))]
        if found := tokens.search("\n".join(texts)):
            raise PicturesDoNotFit(
                f"a text holds {found.group()!r}, which stands for a picture in this model: write a picture as a part "
                "{type: image}"
            )
    if tools and (found := tokens.search(str(tools))):
        raise PicturesDoNotFit(f"a tool holds {found.group()!r}, which stands for a picture in this model")


def insert_pictures(processor: PictureProcessor, text: str, pictures: Sequence[Picture]) -> str:
    """Return the text of a template with each placeholder replaced by the tokens of its picture."""
    pieces = text.split(processor.placeholder)
    if len(pieces) - 1 != len(pictures):
        raise PicturesDoNotFit(
            f"the chat template writes {len(pieces) - 1} times {processor.placeholder!r} for {len(pictures)} pictures: "
            "use a model or a template that writes every picture once"
        )
    whole = pieces[0]
    for picture, after in zip(pictures, pieces[1:], strict=True):
        whole += _expand(processor, picture).text + after
    return whole


def count_tokens(processor: PictureProcessor, pictures: Sequence[Picture]) -> int:
    """Return how many tokens stand for pictures. Raises PicturesDoNotFit for one that the model does not take."""
    return sum(len(_expand(processor, picture).ids) for picture in pictures)


def _expand(processor: PictureProcessor, picture: Picture) -> Expansion:
    try:
        return processor.expand(picture)
    except PictureRefused as refusal:
        raise PicturesDoNotFit(str(refusal)) from refusal


def place_pictures(
    processor: PictureProcessor, ids: Sequence[int], pictures: Sequence[Picture], begin: int
) -> tuple[PlacedPicture, ...]:
    """Return the spans of pictures in ids, from `begin` on. Raises PicturesDoNotFit unless they are all there is."""
    stands_for_some = np.isin(np.asarray(ids[begin:], dtype=np.int64), list(processor.placeholder_ids))
    waiting = np.flatnonzero(stands_for_some) + begin
    places: list[PlacedPicture] = []
    for picture in pictures:
        if not len(waiting):
            raise PicturesDoNotFit(f"there are tokens of {len(places)} pictures, and {len(pictures)} pictures")
        expansion = _expand(processor, picture)
        first = int(waiting[0])
        end = first + len(expansion.ids)
        if tuple(ids[first:end]) != expansion.ids:
            raise PicturesDoNotFit(
                f"the tokens from {first} on are not those of picture {len(places) + 1} of {len(pictures)}, which has "
                f"{picture.width} x {picture.height} pixels"
            )
        places.append(PlacedPicture(picture, first, end, expansion.grid))
        waiting = waiting[waiting >= end]
    if len(waiting):
        raise PicturesDoNotFit(
            f"token {int(waiting[0])} stands for a picture, and there are only {len(pictures)} pictures before it"
        )
    return tuple(places)


def with_text(message: Message, text: str) -> Message:
    """Return a message with another text, which stands between the pictures that it begins and ends with."""
    changed: Message = {**message, "content": text}
    if "parts" in message:
        parts = message["parts"]
        before = list(takewhile(_is_picture, parts))
        after = list(takewhile(_is_picture, reversed(parts[len(before) :])))[::-1]
        changed["parts"] = [*before, {"type": "text", "text": text}, *after]
    return changed


def _is_picture(part: Part) -> bool:
    return part["type"] == "image"
