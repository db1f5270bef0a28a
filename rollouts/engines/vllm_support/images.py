"""Prompts with images for vLLM, and what vLLM made of them.

vLLM expands one token per image itself, and would expand our expanded prompt once more without an error. So each
image's tokens become that one token again, and what vLLM returns is compared with the tokens that will be trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from core.errors import RunStopped
from core.types.images import EncodedImage, PlacedImage

if TYPE_CHECKING:
    from PIL.Image import Image

OPEN_PICTURES = 64
"""Decoded images that are kept: the samples of a group show the same ones."""


def make_prompt(ids: list[int], images: Sequence[PlacedImage], placeholder: int | None) -> dict[str, Any]:
    """Return vLLM's form of a prompt. placeholder: the token that vLLM expands."""
    if not images:
        return {"prompt_token_ids": ids}
    assert placeholder is not None, "a model without a vision part is given no images"
    return {
        "prompt_token_ids": collapse_images(ids, images, placeholder),
        "multi_modal_data": {"image": [_open(place.image) for place in images]},
        "multi_modal_uuids": {"image": [place.image.hash for place in images]},
    }


def collapse_images(ids: Sequence[int], images: Sequence[PlacedImage], placeholder: int) -> list[int]:
    """Return the tokens with one token in place of each image's."""
    collapsed: list[int] = []
    end = 0
    for place in images:
        collapsed += [*ids[end : place.begin], placeholder]
        end = place.end
    return [*collapsed, *ids[end:]]


def check_prompt(seen: Sequence[int], ids: Sequence[int]) -> None:
    """Raise RunStopped unless vLLM saw the tokens that will be trained on."""
    if [*seen] == [*ids]:
        return
    at = next((i for i, (a, b) in enumerate(zip(seen, ids, strict=False)) if a != b), min(len(seen), len(ids)))
    raise RunStopped(
        f"vLLM made {len(seen)} tokens of a prompt with images, where its processor in the trainer makes {len(ids)}; "
        f"the first difference is at token {at}: what it sampled would be trained on after other tokens than it saw; "
        "set rollout.engine=hf"
    )


@lru_cache(maxsize=OPEN_PICTURES)
def _open(image: EncodedImage) -> Image:
    return image.open()
