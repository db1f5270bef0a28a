"""Exported weights: buckets of named tensors, and the scope of an export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

from torch import Tensor

T = TypeVar("T")
Bucket = list[tuple[str, Tensor]]
"""Named full tensors, transferred together."""
SavedModel = Literal["policy", "value", "ema"]
"""Model that a trainer saves: the policy, the value model, or the average of the policy's weights."""

ExportScope = Literal["whole", "files", "adapter"]
"""Tensors to export: all weights of a model, with any adapter merged in, under the model's names; the same under the
names of model files (modeling/file_names.py); or only the adapter."""


def split_into_buckets(items: Iterable[T], bytes_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yield lists of consecutive items, each of at most `max_bytes`; a larger item gets a list of its own.

    >>> list(split_into_buckets([3, 4, 9, 1], bytes_of=lambda n: n, max_bytes=8))
    [[3, 4], [9], [1]]
    """
    bucket: list[T] = []
    held = 0
    for item in items:
        size = bytes_of(item)
        # An empty bucket takes any item, because a tensor is never split.
        if bucket and held + size > max_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += size
    if bucket:
        yield bucket
