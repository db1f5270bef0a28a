"""Load images of a row: bytes, a file, Hugging Face's Image, or a data URI."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from weakref import WeakValueDictionary

from core.errors import quote
from core.types.images import EncodedImage, ImageRefused, read_data_uri, read_image
from core.types.messages import Message, Part
from data_feeds.rows.invalid_rows import InvalidRow

MOST_BYTES = 2**27
"""Maximum size of an image file, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReader:
    """Image loader of one data set. Equal images of rows that are in memory at a time are stored once."""

    folder: Path | None = None
    """Base folder of relative file paths. None for a hub data set, which contains the bytes."""
    max_pixels: int
    max_pixels_key: str
    """Recipe key of max_pixels, for error messages."""
    files: MutableMapping[str, EncodedImage] = field(default_factory=WeakValueDictionary[str, EncodedImage])
    """Images by file name."""
    kept: MutableMapping[str, EncodedImage] = field(default_factory=WeakValueDictionary[str, EncodedImage])
    """Images by hash."""

    def load(self, messages: list[Message], column: str, images: Sequence[Any], *, is_reply: bool) -> list[Message]:
        """Return parsed messages with their images loaded.

        images: those of the row's column, which parts without an image of their own take in order. is_reply: the
        messages may be a reply, and leave all of the column's images to its prompt. Raises InvalidRow for an image that
        cannot be used, and for more or fewer images than places.
        """
        # counted before any image is read: a wrong count is the better error, and costs no decoding
        places = sum(part == {"type": "image"} for m in messages for part in m.get("parts", []))
        if places > len(images):
            raise InvalidRow("bad_image", f"its messages have more places for images than {column} has ({len(images)})")
        if places < len(images) and not (is_reply and not places):
            raise InvalidRow(
                "bad_image",
                f"{column} has {len(images)} images, and its messages have {places} places for them: write a part "
                "{type: image} for each",
            )
        waiting = iter(images)

        def load_part(part: Part) -> Part:
            if part["type"] != "image":
                return part
            has_own = "image" in part
            image = self.read(part["image"], "a part of a message") if has_own else self.read(next(waiting), column)
            return {"type": "image", "image": image}

        return [{**m, "parts": [load_part(part) for part in m["parts"]]} if "parts" in m else m for m in messages]

    def read(self, given: Any, what: str) -> EncodedImage:
        """Load an image. Raises InvalidRow, beginning with `what`, if it is invalid."""
        try:
            if isinstance(given, str) and not given.startswith("data:"):
                return self._read_file(given)
            return self._keep(_find_bytes(given) if not isinstance(given, dict) else self._find_in_dict(given))
        except ImageRefused as refusal:
            raise InvalidRow("bad_image", f"{what}: {refusal}") from refusal

    def _find_in_dict(self, given: dict[Any, Any]) -> bytes:
        """Return the bytes of Hugging Face's Image, {bytes, path}, with one of both set."""
        if given.get("bytes") is not None:
            return _find_bytes(given["bytes"])
        if isinstance(given.get("path"), str):
            return self._read_file(given["path"]).data
        raise ImageRefused(f"an image must be bytes, a path, a data URI or {{bytes, path}}, found {given!r:.60}")

    def _read_file(self, name: str) -> EncodedImage:
        found = self.files.get(name)
        if found is None:
            found = self.files[name] = self._keep(_read_bytes(self._find_file(name)))
        return found

    def _find_file(self, name: str) -> Path:
        # a data set must not make a run send requests, or depend on a server
        if name.startswith(("http://", "https://")):
            raise ImageRefused(f"{quote(name)} is an address, which is not fetched: download it and give its path")
        path = Path(unquote(name.removeprefix("file://")) if name.startswith("file://") else name)
        if not path.is_absolute():
            if self.folder is None:
                raise ImageRefused(f"{quote(name)} is a path, and a data set of the hub must bring the bytes")
            path = self.folder / path
        return path

    def _keep(self, data: bytes) -> EncodedImage:
        image = read_image(data)
        if image.width * image.height > self.max_pixels:
            raise ImageRefused(
                f"the image has {image.width} x {image.height} pixels, more than "
                f"{self.max_pixels_key}={self.max_pixels}"
            )
        return self.kept.setdefault(image.hash, image)  # rows often share an image, under several names


def _read_bytes(path: Path) -> bytes:
    try:
        if not os.path.isfile(path):  # unlike path.is_file, False for a name that is too long
            raise ImageRefused(f"there is no file {quote(path)}")
        if path.stat().st_size > MOST_BYTES:
            raise ImageRefused(f"{quote(path)} has over {MOST_BYTES >> 20} MiB")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, ImageRefused):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ImageRefused(f"{quote(path)} cannot be read ({reason})") from error


def _find_bytes(given: Any) -> bytes:
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str) and given.startswith("data:"):
        return read_data_uri(given)
    raise ImageRefused(f"an image must be bytes, a path, a data URI or {{bytes, path}}, found {given!r:.60}")
