"""Images of messages and samples: original file bytes, identified by their hash."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, unquote_to_bytes

import numpy as np

from core.errors import UserError, name_error

if TYPE_CHECKING:
    from PIL.Image import Image

MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
"""Colour modes that convert to RGB without a colour profile."""
LARGEST_SIDE = 8192
"""Largest accepted side, in pixels."""


class ImageRefused(ValueError):
    """Reason why an image is not usable, or not by this model: a clause to follow the name of the row or file."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EncodedImage:
    """Image file that has been decoded once, by `read_image` or `encode_image`."""

    data: bytes = field(repr=False)
    """File content: PNG, JPEG, WebP, BMP or GIF with one frame."""
    width: int
    height: int
    """Size in pixels."""
    hash: str
    """SHA-256 of `data`, in hexadecimal; identifies the image everywhere."""

    def open(self) -> Image:
        """Decode the image to RGB, with transparency on white."""
        return _decode(self.data)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Image with the span of tokens that represent it in a sample."""

    image: EncodedImage
    begin: int
    end: int
    """Span [begin, end) of the tokens to which the processor expanded one placeholder."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the tokens (rows * columns tokens), for families with three position axes (M-RoPE)."""


class ImageTokens(Protocol):
    """Interface between rollouts and a model's image processor; see modeling/images/processor.py."""

    placeholder_ids: frozenset[int]
    """Ids of the tokens that represent images only."""


class MaySee(Protocol):
    """Interface of a tokenizer whose model may support images; see data_feeds/chat/tokenizer.py."""

    @property
    def images(self) -> ImageTokens | None:
        """Processor of a vision-language model; None for a language model."""
        ...


def read_image(data: bytes, *, most_pixels: int = LARGEST_SIDE**2) -> EncodedImage:
    """Check an image file by decoding it once. Raises ImageRefused."""
    image = _decode(data, most_pixels)
    return EncodedImage(data, image.width, image.height, hashlib.sha256(data).hexdigest())


def describe_image(image: EncodedImage) -> dict[str, str | int]:
    """Describe an image in JSON for files and other programs: hash and size, without the bytes."""
    return {"type": "image", "sha256": image.hash, "width": image.width, "height": image.height}


def encode_image(image: Image) -> EncodedImage:
    """Encode an image as PNG. Raises ImageRefused."""
    drawn = _convert(image)
    file = io.BytesIO()
    drawn.save(file, "PNG")
    data = file.getvalue()
    return EncodedImage(data, drawn.width, drawn.height, hashlib.sha256(data).hexdigest())


def _decode(data: bytes, most_pixels: int = LARGEST_SIDE**2) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > most_pixels:
                raise ImageRefused(f"the image has {image.width} x {image.height} pixels, over {most_pixels} in all")
            return _convert(image)
    except ImageRefused:
        raise
    except UnidentifiedImageError as error:
        raise ImageRefused("the image is in no known format") from error
    except Image.DecompressionBombError as error:
        raise ImageRefused("the image has too many pixels") from error
    except Exception as error:  # a border: a broken file can make the library raise anything
        raise ImageRefused(f"the image is damaged ({name_error(error)})") from error


def _convert(image: Image) -> Image:
    """Convert an opened image to upright RGB, with transparency on white."""
    from PIL import Image, ImageOps

    if max(image.size) > LARGEST_SIDE:
        raise ImageRefused(f"the image has {image.width} x {image.height} pixels, over {LARGEST_SIDE}")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # a camera's JPEG with a preview
        raise ImageRefused(f"the image has {image.n_frames} frames, and one is expected")  # pyright: ignore
    # CMYK and similar modes need a colour profile: without one, colours change silently.
    if image.mode not in MODES:
        raise ImageRefused(f"the image has the colour mode {image.mode}: convert it to RGB")
    # Cameras store the rotation as metadata, which the model never sees.
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "I;16":  # grey in 16 bits
        return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert("RGB")
    # A PNG may make one colour transparent, and still call itself RGB.
    if upright.mode == "RGB" and "transparency" not in upright.info:
        return upright.copy()
    clear = upright.convert("RGBA")
    white = Image.new("RGBA", clear.size, "white")
    return Image.alpha_composite(white, clear).convert("RGB")


def write_data_uri(image: EncodedImage) -> str:
    """Encode an image as a data URI with the file's media type."""
    from PIL import Image

    with Image.open(io.BytesIO(image.data)) as opened:
        kind = Image.MIME[opened.format or "PNG"]
    return f"data:{kind};base64,{base64.b64encode(image.data).decode()}"


def read_data_uri(uri: str) -> bytes:
    """Return the bytes of a data URI. Raises ImageRefused.

    >>> read_data_uri("data:image/png;base64,aGk="), read_data_uri("data:,h%69")
    (b'hi', b'hi')
    """
    head, comma, body = uri.partition(",")
    if not comma:
        raise ImageRefused(f"a data URI must be data:image/png;base64,..., found {uri!r:.60}")
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        # In a URI the characters + and / of base64 may be written as %2B and %2F.
        return base64.b64decode(unquote(body), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageRefused(f"the base64 text of a data URI is damaged ({error})") from error


def list_written(length: int, images: Sequence[PlacedImage]) -> list[int]:
    """List the positions after the first whose tokens are text. Only these could have been sampled.

    >>> list_written(6, [PlacedImage(None, 2, 4)])
    [1, 4, 5]
    """
    seen = {i for place in images for i in range(place.begin, place.end)}
    return [i for i in range(1, length) if i not in seen]


def as_argument(images: Sequence[PlacedImage]) -> dict[str, Any]:
    """Return the keyword argument `images` of a call, or none without images, so that text-only code need not accept
    it.

    >>> as_argument([])
    {}
    """
    return {"images": images} if images else {}


def check_places(places: Sequence[PlacedImage], length: int) -> None:
    """Raise UserError unless the spans are ordered, disjoint and within `length` tokens."""
    end = 0
    for place in places:
        if not end <= place.begin < place.end <= length:
            raise UserError(
                f"images of a Sample must have spans [begin, end) in order within its {length} tokens; found "
                f"{[(p.begin, p.end) for p in places]!r:.80}"
            )
        end = place.end
