"""Positions along three axes (M-RoPE), for families that represent images as grids of tokens.

Text advances along all three axes. All tokens of an image have the same time, and rows and columns counted from there.
The text after it continues from the larger of the two:

    tokens    a  b  [ an image of 2 rows and 3 columns ]   c
    time      0  1    2   2   2   2   2   2                 5
    row       0  1    2   2   2   3   3   3                 5
    column    0  1    2   3   4   2   3   4                 5
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.types.images import PlacedImage


def find_rope_ids(length: int, images: Sequence[PlacedImage]) -> NDArray[np.int64]:
    """Return the positions [3, length] of a sequence; an image's span is its grid, row by row.

    Raises ValueError for an image without a grid, or with a grid that does not match the span.
    """
    parts: list[NDArray[np.int64]] = []
    done = position = 0
    for place in images:
        if place.grid is None or place.grid[0] * place.grid[1] != place.end - place.begin:
            raise ValueError(f"an image has the grid {place.grid} and {place.end - place.begin} tokens")
        text = place.begin - done
        parts.append(_count_on(position, text))
        position += text
        rows, columns = place.grid
        time = np.zeros(rows * columns, dtype=np.int64)
        parts.append(position + np.stack([time, np.arange(rows).repeat(columns), np.tile(np.arange(columns), rows)]))
        # The next text must come after every row and column of the image.
        position += max(rows, columns)
        done = place.end
    return np.concatenate([*parts, _count_on(position, length - done)], axis=1)


def _count_on(begin: int, n: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(begin, begin + n, dtype=np.int64), (3, n))
