"""Turns of a conversation as the files of data sets hold them: calls of tools, and images."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.types.images import EncodedImage
from core.types.messages import Message

if TYPE_CHECKING:
    import pyarrow as pa

Save = Callable[[EncodedImage], Any]
"""Returns what stands in the file for an image."""


def turn_type(*, calls: bool, images: bool) -> pa.DataType:
    """Return the Arrow type of turns of which some hold calls, and some images.

    An image has the form of an Image column of Hugging Face datasets. Parquet gives every object all keys, so the
    arguments of a call are JSON text.
    """
    import pyarrow as pa

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", image)])
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    call = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", function)])
    fields: list[tuple[str, pa.DataType]] = [("role", pa.string())]
    fields.append(("content", pa.list_(part) if images else pa.string()))
    if calls:
        fields.append(("tool_calls", pa.list_(call)))
    return pa.struct(fields)


def write_turn(turn: Message, save: Save, *, as_parts: bool = False) -> dict[str, Any]:
    """Return a turn whose content is text or parts, and whose calls have their arguments as JSON text.

    as_parts: write text as a part too, where all contents must have one type.
    """
    written: dict[str, Any] = {key: value for key, value in turn.items() if key != "parts"}
    if "parts" in turn:
        written["content"] = [
            part if part["type"] == "text" else {"type": "image", "image": save(part["image"])}
            for part in turn["parts"]
        ]
    elif as_parts:
        written["content"] = [{"type": "text", "text": turn["content"]}]
    if "tool_calls" in turn:
        functions = [call["function"] for call in turn["tool_calls"]]
        texts = [{**one, "arguments": json.dumps(one["arguments"], ensure_ascii=False)} for one in functions]
        written["tool_calls"] = [
            {**call, "function": function} for call, function in zip(turn["tool_calls"], texts, strict=True)
        ]
    return written


def embed_image(image: EncodedImage) -> dict[str, Any]:
    """Return an image's value in a column of Parquet."""
    return {"bytes": image.data, "path": None}


def save_beside(file: Path) -> Save:
    """Return what saves an image into a folder beside `file`, under its hash, and returns its path from there."""
    folder = file.with_name(f"{file.stem}_images")

    def save(image: EncodedImage) -> str:
        from PIL import Image

        with Image.open(io.BytesIO(image.data)) as opened:
            kind = (opened.format or "png").lower()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{image.hash[:16]}.{kind}"
        path.write_bytes(image.data)
        return str(path.relative_to(file.parent))

    return save
