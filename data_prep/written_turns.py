"""Turns of a conversation in data set files: tool calls and images."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.types.images import EncodedImage
from core.types.messages import Message

if TYPE_CHECKING:
    import pyarrow as pa

Save = Callable[[EncodedImage], Any]
"""Returns the value stored for an image."""


def turn_type(*, calls: bool, images: bool, others: Collection[str] = ()) -> pa.DataType:
    """Return the Arrow type of turns, with tool calls, images and other fields if present.

    An image has the type of an Image column of Hugging Face datasets. Arguments of a call are JSON text, since Parquet
    gives every object all keys.
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
    fields += [(name, pa.bool_() if name == "train" else pa.string()) for name in sorted(others)]
    return pa.struct(fields)


def write_turn(turn: Message, save: Save, *, as_parts: bool = False) -> dict[str, Any]:
    """Return a turn for a file. Content is text or parts, and arguments of calls are JSON text.

    as_parts: write text as a part too, since a column has one type.
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
    """Return the value of an image in a Parquet column."""
    return {"bytes": image.data, "path": None}


def save_beside(file: Path) -> Save:
    """Return a function that saves an image beside `file`, named by hash, and returns the relative path."""
    folder = file.with_name(f"{file.stem}_images")

    def save(image: EncodedImage) -> str:
        from PIL import Image

        # the file keeps its original bytes, so the suffix must name their format
        with Image.open(io.BytesIO(image.data)) as opened:
            kind = (opened.format or "png").lower()
        folder.mkdir(parents=True, exist_ok=True)
        # 64 bits of the hash: enough that no two images of a data set share a name
        path = folder / f"{image.hash[:16]}.{kind}"
        path.write_bytes(image.data)
        # relative, so that file and folder can be moved together
        return str(path.relative_to(file.parent))

    return save
