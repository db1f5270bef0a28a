"""Prompts with images for vLLM, and validation of vLLM's expansion.

vLLM expands one token per image, and would expand an expanded prompt again without an error. So each image's tokens are
collapsed to that one token. The prompt returned by vLLM is then compared with the tokens to train on.
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
"""Number of decoded images in the cache. The samples of a group share images."""


def make_prompt(ids: list[int], images: Sequence[PlacedImage], placeholder: int | None) -> dict[str, Any]:
    """Return a prompt in vLLM's format. placeholder: the token that vLLM expands."""
    if not images:
        return {"type": "token", "prompt_token_ids": ids}  # as vLLM's own renderer returns it, so it is not run
    assert placeholder is not None, "a model without a vision part is given no images"
    return {
        "prompt_token_ids": collapse_images(ids, images, placeholder),
        "multi_modal_data": {"image": [_open(place.image) for place in images]},
        # vLLM caches image features under these ids
        "multi_modal_uuids": {"image": [place.image.hash for place in images]},
    }


def collapse_images(ids: Sequence[int], images: Sequence[PlacedImage], placeholder: int) -> list[int]:
    """Replace each image's tokens by a single token."""
    collapsed: list[int] = []
    end = 0
    for place in images:
        collapsed += [*ids[end : place.begin], placeholder]
        end = place.end
    return [*collapsed, *ids[end:]]


def check_prompt(seen: Sequence[int], ids: Sequence[int]) -> None:
    """Raise RunStopped unless vLLM saw the tokens to train on."""
    if [*seen] == [*ids]:
        return
    at = next((i for i, (a, b) in enumerate(zip(seen, ids, strict=False)) if a != b), min(len(seen), len(ids)))
    raise RunStopped(
        f"vLLM expanded a prompt with images to {len(seen)} tokens, and we expanded it to {len(ids)} (first difference "
        f"at token {at}); training would use the wrong prompt: set rollout.engine=hf"
    )


@lru_cache(maxsize=OPEN_PICTURES)
def _open(image: EncodedImage) -> Image:
    return image.open()
