"""Cut a stream of things into pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_buckets(items: Iterable[T], bytes_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Consecutive items whose sizes add up to at most `max_bytes`; a larger one stands alone."""
    bucket: list[T] = []
    held = 0
    for item in items:
        size = bytes_of(item)
        if bucket and held + size > max_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += size
    if bucket:
        yield bucket
