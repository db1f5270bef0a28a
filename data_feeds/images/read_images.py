"""Load images of a row: bytes, a file, Hugging Face's Image, or a data URI."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from core.errors import quote
from core.types.images import EncodedImage, ImageRefused, read_data_uri, read_image
from core.types.messages import ImagePart
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.values import SOURCES, is_absent

MOST_BYTES = 2**27
"""Maximum size of an image file, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReader:
    """Image loader of one data set. Equal images of several rows are stored once."""

    folder: Path | None = None
    """Base folder of relative file paths. None for a hub data set, which contains the bytes."""
    max_pixels: int
    max_pixels_key: str
    """Recipe key of max_pixels, for error messages."""
    files: dict[str, EncodedImage] = field(default_factory=dict[str, EncodedImage])
    """Images by file name."""
    kept: dict[str, EncodedImage] = field(default_factory=dict[str, EncodedImage])
    """Images by hash."""

    def read_all(self, given: Any, column: str) -> list[EncodedImage]:
        """Load the images of a column: one image, or a list. Raises InvalidRow for other values."""
        if is_absent(given):
            return []
        return [self.read(one, column) for one in (given if isinstance(given, list) else [given])]

    def make_places(self, given: Any, column: str) -> Placeholders:
        """Return the images of a row's column, for message parts without an image."""
        return Placeholders(self, self.read_all(given, column), column)

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
        if name not in self.files:
            self.files[name] = self._keep(_read_bytes(self._find_file(name)))
        return self.files[name]

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


class Placeholders:
    """Images of a row's column, assigned in order to message parts without an image."""

    def __init__(self, reader: ImageReader, images: Sequence[EncodedImage], column: str):
        self.reader, self.column = reader, column
        self.all = list(images)
        self._left: Iterator[EncodedImage] = iter(self.all)
        self.taken = 0

    def read_part(self, part: dict[str, Any]) -> ImagePart:
        """Return a message part with its image."""
        given = {name: value for name, value in part.items() if name in SOURCES and not is_absent(value)}
        if len(given) > 1:
            raise InvalidRow("bad_image", f"a part has several images: {', '.join(sorted(given))}")
        if given:
            [source] = given.values()
            if isinstance(source, dict) and "url" in source:  # OpenAI's form
                source = source["url"]
            return {"type": "image", "image": self.reader.read(source, "a part of a message")}
        self.taken += 1
        image = next(self._left, None)
        if image is None:
            raise InvalidRow(
                "bad_image", f"its messages have more places for images than {self.column} has ({len(self.all)})"
            )
        return {"type": "image", "image": image}

    def check_all_taken(self, *, is_reply: bool) -> None:
        """Raise InvalidRow for unused images. A reply may leave all of them to the prompt."""
        if self.taken < len(self.all) and not (is_reply and not self.taken):
            raise InvalidRow(
                "bad_image",
                f"{self.column} has {len(self.all)} images, and its messages have {self.taken} places for them: "
                "write a part {type: image} for each",
            )
