"""Messages whose text is replaced, and messages as other programs get them."""

from __future__ import annotations

from typing import Any

import pytest

from core.types.images import EncodedImage
from core.types.messages import describe_message, with_text

ONE, TWO = (EncodedImage(data=b"", width=3, height=2, hash=name) for name in "ab")
SEEN: list[Any] = [{"type": "image", "image": ONE}, {"type": "image", "image": TWO}]
SAID: list[Any] = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
NEW: list[Any] = [{"type": "text", "text": "new"}]


@pytest.mark.parametrize(
    ("parts", "changed"),
    [
        ([*SAID], NEW),
        ([*SEEN], [*SEEN, *NEW]),
        ([SEEN[0], *SAID], [SEEN[0], *NEW]),
        ([SAID[0], SEEN[0], SAID[1], *SEEN], [*NEW, *SEEN]),
        ([*SEEN, *SAID, SEEN[0], SAID[0], SEEN[1]], [*SEEN, *NEW, SEEN[1]]),
    ],
)
def test_a_new_text_stands_between_the_images_at_both_ends(parts, changed):
    message: Any = {"role": "user", "content": "xy", "parts": parts}
    assert with_text(message, "new") == {"role": "user", "content": "new", "parts": changed}
    assert message["content"] == "xy" and message["parts"] is parts


def test_other_programs_get_the_hash_and_size_of_an_image():
    message: Any = {"role": "user", "content": "x", "parts": [SEEN[1], SAID[0]]}
    told = {"type": "image", "sha256": "b", "width": 3, "height": 2}
    assert describe_message(message) == message | {"parts": [told, SAID[0]]}
    assert with_text({"role": "user", "content": "x"}, "y") == {"role": "user", "content": "y"}
