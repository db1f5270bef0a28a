"""Routes of the input tokens of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.types.routes import UNKNOWN, to_tensor
from core.types.samples import Sample


def select_routes(samples: Sequence[Sample], places: Sequence[NDArray[np.integer[Any]]], total: int) -> Tensor | None:
    """Return the routes of a row's tokens, [T, layers, k] int16; None if no sample has any.

    places: row positions of each sample's input tokens. total: T. A token that samples share has the routes of the
    first sample that knows them. Raises ValueError for samples of models with other blocks.
    """
    routed = [(s.routes, place) for s, place in zip(samples, places, strict=True) if s.routes is not None]
    if not routed:
        return None
    shapes = {routes.shape[1:] for routes, _ in routed}
    if len(shapes) > 1:
        raise ValueError(f"the routes of a micro-batch have several shapes [layers, k]: {sorted(shapes)}")
    row = torch.full((total, *shapes.pop()), UNKNOWN, dtype=torch.int16)
    # in reverse, so that the first sample is written last
    for routes, place in reversed(routed):
        own, where = to_tensor(routes[: len(place)]), torch.from_numpy(place)
        row[where] = torch.where(own == UNKNOWN, row[where], own)
    return row
