"""Attention over the segments of a packed row on a GPU, in a single call of torch's flash attention.

`varlen_attn` takes queries and keys of different lengths end to end. Its causal mask is aligned at the lower right. The
last query of a segment attends to all keys, the query before it to all but one. So the keys of a segment are gathered
from its ancestors and itself, and the queries are its own. The gradient of the gathering sums over all segments that
share a key. Without sharing, nothing is gathered.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from core.gpu_contract import load_part
from modeling.segments import Segments

LARGEST_HEAD = 256
"""Largest head dimension of flash attention; it must also be a multiple of 8."""
NEEDED_CAPABILITY = (8, 0)
"""Compute capability required by flash attention (Ampere)."""


def fits_varlen(query: Tensor, value: Tensor) -> bool:
    """Tell whether the kernel supports these heads: on a recent GPU, in half precision, queries as wide as values."""
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    fits_head = query.shape[-1] % 8 == 0 and query.shape[-1] <= LARGEST_HEAD and query.shape[-1] == value.shape[-1]
    return fits_head and torch.cuda.get_device_capability(query.device) >= NEEDED_CAPABILITY


def gather_keys(x: Tensor, keys: Tensor) -> Tensor:
    """Select rows of keys or values, [T, H, D] -> [K, H, D]; gradients of a row are summed in float32.

    A GPU adds the gradients of 64 replies to those of their prompt one by one, and would round 64 times in bfloat16.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide).index_select(0, keys).to(x.dtype)


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, window: int | None
) -> Tensor:
    """Compute attention of a row: [1, H, T, D] queries, [1, Hkv, T, D] keys and values -> [1, T, H, D].

    `python -m tools.gpu_check` compares it with the kernel of attention.py on a CPU.
    """
    varlen_attn = load_part("varlen_attn")
    # earlier versions take fewer heads of keys than of queries without being told
    must_tell = query.shape[1] != key.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters
    more: dict[str, Any] = {"enable_gqa": True} if must_tell else {}

    index = segments.index_keys(query.device)
    # squeeze, not [0]: the gradient of an index would be a copy
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    if index.keys is not None:
        k, v = gather_keys(k, index.keys), gather_keys(v, index.keys)
    done = varlen_attn(
        # the transpose above is a view
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        index.query_ends,
        index.key_ends,
        index.longest_query,
        index.longest_key,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # tokens to the left, and none to the right
        **more,
    )
    assert isinstance(done, Tensor)
    return done[None]
