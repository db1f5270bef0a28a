"""Notes of rewards: texts for people who look at a sample, such as the verdict of a judge."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class Note(TypedDict):
    """Text that explains a reward. It is JSON, and never trained on."""

    by: str
    """Author, such as the name of a judge's model."""
    text: str
    """Text of the author."""
    reading: NotRequired[float | str | None]
    """Value that was read from the text; None if it could not be read."""
    seconds: NotRequired[float]
    """Seconds that the author took."""
    cached: NotRequired[bool]
    """True if the text is of an earlier, equal request."""
