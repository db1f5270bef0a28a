"""Image processor of a vision-language model: tokens of an image, and tensors for the vision tower.

A template writes one placeholder per image. It is expanded in the text, before encoding. So all code that splits,
compares and encodes texts works on the tokens of the model.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from core.errors import RunStopped, UserError, name_error, quote
from core.hub import describe_hub
from core.types.images import EncodedImage, ImageRefused, PlacedImage
from core.types.messages import Message, ToolSpec
from modeling.hf_config import read_config
from modeling.images.cache import CACHE, CachedImage
from modeling.images.families import Grid
from modeling.images.vision import VISION_FAMILIES, ImageFamily
from modeling.pretrained import load_pretrained, refuse_own_code

MOST_SIZES = 4096
"""Number of image sizes whose tokens are cached."""
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model folder that describe the processor."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Tokens that represent an image."""

    text: str
    """Text that replaces the placeholder."""
    written: str
    """Part of it that represents the image; the rest is text."""
    ids: tuple[int, ...]
    """Tokens of `written`."""
    grid: Grid | None
    """Rows and columns of the tokens, for families with three position axes."""


class ImageProcessor:
    """Image processor of a vision-language model: transformers' image processor, with the image tokens.

    Without torchvision, transformers uses an image processor on PIL, whose pixels differ in rounding. So torchvision
    must be installed in all processes of a run, or in none.
    """

    def __init__(
        self, path: str, *, key: str = "model.path", trust_remote_code: bool = False, tokenizer: Any = None
    ) -> None:
        """tokenizer: the model's, if already loaded."""
        from transformers import AutoImageProcessor, AutoTokenizer
        from transformers.processing_utils import ProcessorMixin

        self.path, self.who = path, f"{key}={quote(path)}"
        config = read_config(path, key=key, trust_remote_code=trust_remote_code)
        try:
            self.tokenizer = tokenizer or load_pretrained(AutoTokenizer, path, trust_remote_code=trust_remote_code)
            self.images: Any = load_pretrained(AutoImageProcessor, path, trust_remote_code=trust_remote_code)
            described, _ = ProcessorMixin.get_processor_dict(path)
        except Exception as error:  # a border: a missing or broken file makes the library raise anything
            refusal = refuse_own_code(error, key=key, path=path, trust_remote_code=trust_remote_code)
            more = "" if os.path.isdir(path) else f"; {describe_hub()}"
            raise UserError(
                refusal
                or f"{self.who}: its image processor cannot be loaded: {name_error(error)}: save the model "
                f"with its {FILES[0]}{more}"
            ) from error
        self.family: ImageFamily = VISION_FAMILIES[config.model_type].images(
            self.images, self.tokenizer, config, described, self.who
        )
        self.placeholder = self.family.placeholder
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        self.placeholder_id = vocabulary.get(self.placeholder, -1)
        if vocabulary.get(token := self.family.token) != config.image_token_id:
            raise UserError(
                f"{self.who}: its images are the token {config.image_token_id}, and its tokenizer has "
                f"{token!r} as {vocabulary.get(token)}: take config and tokenizer of one model"
            )
        self.reserved = tuple(text for text in self.family.reserved if text in vocabulary)
        """Texts of `placeholder_ids`."""
        self.placeholder_ids = frozenset(vocabulary[text] for text in self.reserved)
        self.chat_template: str | None = _find_template(described.get("chat_template"))
        """Template of the processor; None: the tokenizer's applies."""
        self._expand_size = lru_cache(MOST_SIZES)(self._expand_anew)
        # a part of the cache's key: policy and reward model may cut the same image in other ways
        self._settings = f"{type(self.images).__qualname__} {self.images.to_json_string()}"

    def expand(self, image: EncodedImage) -> Expansion:
        """Return the tokens that represent an image, determined by its size. Raises ImageRefused."""
        return self._expand_size(image.width, image.height)

    def _expand_anew(self, width: int, height: int) -> Expansion:
        cut = self.family.count(width, height)
        text = self.family.write(cut)
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        # a token that the tokenizer lacks would be encoded as letters, and the model would see no image
        if not ids or {ids[0], ids[-1]} - self.placeholder_ids:
            raise UserError(f"{self.who}: its tokenizer lacks tokens of images: it reads {text[:60]!r} as text")
        whole = f"{self.family.around}{text}{self.family.around}"
        return Expansion(whole, text, ids, self.family.find_grid(cut))

    def check_texts(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Raise ImageRefused for a text that contains a reserved image token."""
        # such a text would be taken for an image, and shift the features of the real ones
        tokens = re.compile("|".join(map(re.escape, self.reserved)))
        for message in messages:
            texts = [message["content"], message.get("reasoning", ""), str(message.get("tool_calls", ""))]
            if found := tokens.search("\n".join(texts)):
                raise ImageRefused(
                    f"a text holds {found.group()!r}, which stands for an image in this model: write an image as a "
                    "part {type: image}"
                )
        if tools and (found := tokens.search(str(tools))):
            raise ImageRefused(f"a tool holds {found.group()!r}, which stands for an image in this model")

    def insert_tokens(self, text: str, images: Sequence[EncodedImage]) -> str:
        """Replace each placeholder in a rendered text by the tokens of its image. Raises ImageRefused."""
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != len(images):
            raise ImageRefused(
                f"the chat template writes {len(pieces) - 1} times {self.placeholder!r} for {len(images)} "
                "images: use a model or a template that writes every image once"
            )
        whole = pieces[0]
        for image, after in zip(images, pieces[1:], strict=True):
            whole += self.expand(image).text + after
        return whole

    def place_images(self, ids: Sequence[int], images: Sequence[EncodedImage], begin: int) -> tuple[PlacedImage, ...]:
        """Return the token spans of images in ids, from `begin` on. Raises ImageRefused if they do not match."""
        stands_for_some = np.isin(np.asarray(ids[begin:], dtype=np.int64), list(self.placeholder_ids))
        waiting = np.flatnonzero(stands_for_some) + begin
        places: list[PlacedImage] = []
        for image in images:
            if not len(waiting):
                raise ImageRefused(f"there are tokens of {len(places)} images, and {len(images)} images")
            expansion = self.expand(image)
            first = int(waiting[0])
            end = first + len(expansion.ids)
            # the tokens depend on the size of the image, so a mismatch means another image or other settings
            if tuple(ids[first:end]) != expansion.ids:
                raise ImageRefused(
                    f"the tokens from {first} on are not those of image {len(places) + 1} of {len(images)}, which has "
                    f"{image.width} x {image.height} pixels"
                )
            places.append(PlacedImage(image, first, end, expansion.grid))
            waiting = waiting[waiting >= end]
        if len(waiting):
            raise ImageRefused(
                f"token {int(waiting[0])} stands for an image, and there are only {len(images)} images before it"
            )
        return tuple(places)

    def process(self, image: EncodedImage) -> dict[str, Tensor]:
        """Return the vision tower's inputs for one image, cached. Raises ImageRefused."""
        expansion = self.expand(image)
        made = CACHE.find(self._settings, image.hash)
        if made is None:
            made = self._process_anew(image)
            CACHE.add(self._settings, image.hash, made)
        # The tokens are computed from the size alone, before any pixel is read; here both computations must agree.
        if self.family.write(made.cut) != expansion.written:
            raise RunStopped(
                f"{self.who}: its processor cuts {image.width} x {image.height} pixels into {made.cut}, and "
                f"{self.family.count(image.width, image.height)} was expected: install the version of transformers "
                "that constraints.txt names"
            )
        return made.tensors

    def _process_anew(self, image: EncodedImage) -> CachedImage:
        try:
            found = self.images(images=[image.open()], return_tensors="pt", **self.family.settings)
        except ValueError as error:
            raise ImageRefused(f"the model's processor refuses the image ({error})") from error
        return CachedImage(*self.family.read(found))

    def collate(self, images: Sequence[EncodedImage]) -> dict[str, Tensor]:
        """Return the vision tower's inputs for the images of a row, in token order."""
        return self.family.collate([self.process(image) for image in images]) if images else {}

    def save(self, folder: Path) -> None:
        """Copy the processor's files, so that a saved model is complete."""
        from transformers.utils.hub import cached_file, has_file

        for name in FILES:
            if has_file(self.path, name) and (found := cached_file(self.path, name)):
                shutil.copyfile(found, folder / name)

    def __getstate__(self) -> dict[str, Any]:
        # An lru_cache cannot be pickled; __setstate__ creates it again.
        return {**self.__dict__, "_expand_size": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._expand_size = lru_cache(MOST_SIZES)(self._expand_anew)


def _find_template(given: Any) -> str | None:
    """Return the chat template of a processor, which may have several by name."""
    return given.get("default") if isinstance(given, dict) else given
