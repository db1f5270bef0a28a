"""Routes: the experts that the routers of a mixture chose for a token that was an input of the model.

An engine records them, and the trainer may force them (`rollout.router_replay`; https://arxiv.org/abs/2510.11370). They
are small: a byte per block and choice, 384 bytes per token for 48 blocks with 8 experts each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import UserError
from core.types.arrays import Mask

RouterReplay = Literal["off", "watch", "replay"]
Routes = NDArray[np.unsignedinteger[Any]]
"""[L, layers, k] uint8 or uint16, the experts of each token, in each of the model's blocks of experts in their order.
The largest number of the dtype at all k: unknown, as of the last token, which was never an input."""
ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))
UNKNOWN, PADDING = -1, -2
"""In tensors: a token without a route in a block, and a position without a token."""


def dtype_for(n_experts: int) -> np.dtype[Any]:
    """Return the smallest dtype that holds every expert's number, and one more for unknown routes."""
    return next(dtype for dtype in ROUTE_DTYPES if n_experts <= np.iinfo(dtype).max)


def unknown_of(routes: Routes) -> int:
    """Return the number that marks an unknown route in this array."""
    return int(np.iinfo(routes.dtype).max)


def find_unknown(routes: Routes) -> Mask:
    """Return [L, layers] bool, True where the route is unknown."""
    return routes[..., 0] == unknown_of(routes)


def extend(routes: Routes, length: int) -> Routes:
    """Return routes of `length` tokens; those of added tokens are unknown."""
    added = np.full((length - len(routes), *routes.shape[1:]), unknown_of(routes), dtype=routes.dtype)
    return np.concatenate([routes, added])


def fill_unknown(known: Routes | None, later: Routes) -> Routes:
    """Return routes of the tokens of `later`, those of `known` where it has any.

    A later request computes the tokens before it again. Sampled tokens keep the routes under which they were sampled.
    """
    if known is None:
        return later
    before = extend(known, len(later))
    return np.where(find_unknown(before)[..., None], later, before)


def check_routes(routes: Routes, length: int) -> None:
    """Raise UserError unless `routes` are those of `length` tokens; make them read-only."""
    if routes.dtype not in ROUTE_DTYPES or routes.ndim != 3 or len(routes) != length:
        raise UserError(
            f"routes must be [tokens, layers, k] in uint8 or uint16 for {length} tokens, found {list(routes.shape)} in "
            f"{routes.dtype}"
        )
    routes.setflags(write=False)  # as Ray returns them


def to_tensor(routes: Routes) -> Tensor:
    """Return routes as int16, with UNKNOWN where they are unknown."""
    wide = routes.astype(np.int32)
    return torch.from_numpy(np.where(wide == unknown_of(routes), UNKNOWN, wide).astype(np.int16))


def describe_routes(routes: Routes) -> dict[str, Any]:
    """Return routes for `to_json`, which writes arrays without their shape."""
    return {"flat": routes.ravel(), "shape": list(routes.shape)}


def restore_routes(described: Mapping[str, Any]) -> Routes:
    """Invert `describe_routes`."""
    return described["flat"].reshape(described["shape"])
