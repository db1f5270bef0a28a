"""Attention in fixed order: a query has the same bits in every batch, at any length, padding, packing, or cache.

The keys of a sequence are read in blocks of KEY_BLOCK from the first token on, with an online softmax in float32. Its
queries are in tiles of TILE positions, and position p has place p % TILE in the tile. So every matrix product has one
shape, and every sum one order. A block that a query does not see adds exactly 0 and scales by exactly 1, so it makes
no difference whether it is computed. A row that decodes one token takes the same path as a training pass.

The backward pass is that of modeling/attention.py, since only the forward pass must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from core.types.allowed_tokens import LOWEST
from modeling.attention import FIXED_ORDER, attend_by_sequence, attend_runs, refuse_others, set_attention
from modeling.attention_scores import Scores
from modeling.fixed_order import compute_elementwise
from modeling.segments import Segments

TILE = 8
"""Positions of a tile of queries. All heads that share a head of keys are in it."""
KEY_BLOCK = 64
"""Keys of a block."""


def use_fixed_order(model: nn.Module, *, key_block: int = KEY_BLOCK) -> None:
    """Set this attention in the language part of a model, unless its code takes none by name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(FIXED_ORDER, partial(attend_in_fixed_order, key_block=key_block))
    AttentionMaskInterface.register(FIXED_ORDER, flash_attention_mask)  # [B, keys], or None without padding
    set_attention(model, FIXED_ORDER)


def attend_in_fixed_order(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    key_block: int = KEY_BLOCK,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention: [B, H, n, D] queries, [B, Hkv, m, D] keys and values -> [B, n, H, D].

    This is the attention interface of transformers. Without a cache it takes the inputs of `attend_by_sequence`. With
    one, or with padding on the left, attention_mask is [B, m], 0 at the padding, and the queries are the last token or
    all. Raises ValueError for sinks, and as `attend_by_sequence` does.
    """
    refuse_others(FIXED_ORDER, module, is_causal=is_causal, dropout=dropout, others=others | {"s_aux": s_aux})
    scores = Scores(scaling=scaling, window=sliding_window, cap=softcap)
    attend = partial(attend_blocks, scores=scores, key_block=key_block)
    mask = None if attention_mask is None or not attention_mask.numel() else attention_mask
    if mask is not None or query.shape[2] != key.shape[2]:
        return _attend_cached(query, key, value, mask, attend).transpose(1, 2), None

    def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if segments is not None:
            return attend_runs(q, k, v, segments, lambda q, k, v, run: attend(q, k, v, begins=_fill(run.above, q)))
        return attend(q, k, v, begins=_fill(0, q)).transpose(1, 2)

    def attend_usually(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        settings: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        return attend_by_sequence(module, q, k, v, None, segments=segments, **settings)[0]

    return _OtherBackward.apply(query, key, value, attend_all, attend_usually), None


def _attend_cached(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attend: Callable[..., Tensor]
) -> Tensor:
    """Compute attention of rows padded on the left: all tokens, or the last of each, [B, H, n, D] -> [B, H, n, Dv]."""
    n, m = query.shape[2], key.shape[2]
    if n not in (1, m) or (mask is not None and mask.ndim != 2):
        raise ValueError(f"attention {FIXED_ORDER} takes all tokens or the last, found {n} of {m}")
    padding = _fill(0, query) if mask is None else m - mask.sum(-1)  # [B]
    # to the left, so that the first token of each sequence is the first key
    key, value = (_shift(x, padding) for x in (key, value))
    if n == 1:
        return attend(query, key, value, begins=m - 1 - padding)
    return _shift(attend(_shift(query, padding), key, value, begins=_fill(0, query)), -padding)


def _fill(number: int, rows: Tensor) -> Tensor:
    return torch.full((len(rows),), number, dtype=torch.int64, device=rows.device)


def _shift(x: Tensor, by: Tensor) -> Tensor:
    """Move the positions of each row to the left; the ends repeat. x: [B, H, n, D]; by: [B], may be negative."""
    last = x.shape[2] - 1
    places = (torch.arange(last + 1, device=x.device) + by[:, None]).clamp(0, last)  # [B, n]
    return x.gather(2, places[:, None, :, None].expand_as(x))


@torch.no_grad()
def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, begins: Tensor, scores: Scores, key_block: int = KEY_BLOCK
) -> Tensor:
    """Compute attention: [B, H, n, D] queries, [B, Hkv, m, D] keys and values -> [B, H, n, Dv], of the values' dtype.

    begins: [B] int64, positions of the first queries; the first key has position 0.
    """
    heads, n = k.shape[1], q.shape[2]
    inside = begins % TILE
    first = begins - inside  # position of the first tile
    places = inside[:, None] + torch.arange(n, device=q.device)  # [B, n]
    tiles = -(-(int(inside.max()) + n) // TILE)
    rows = torch.arange(len(q), device=q.device)[:, None]
    wide = torch.promote_types(q.dtype, torch.float32)
    placed = q.new_zeros((len(q), tiles * TILE, *q.shape[1::2]), dtype=wide)  # [B, tiles * TILE, H, D]
    placed[rows, places] = q.to(wide).transpose(1, 2) * (
        q.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    )
    # [B, Hkv, tiles, TILE * G, D]: position and head of queries are the rows of a tile
    placed = placed.unflatten(2, (heads, -1)).unflatten(1, (-1, TILE)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
    positions = first[:, None] + torch.arange(tiles * TILE, device=q.device)  # [B, tiles * TILE]
    positions = positions.repeat_interleave(q.shape[1] // heads, 1).view(len(q), 1, tiles, -1, 1)
    keys, values = (_cut_blocks(x.to(wide), key_block) for x in (k, v))
    largest = placed.new_full((*placed.shape[:-1], 1), LOWEST)
    total = torch.zeros_like(largest)
    mean = placed.new_zeros((*placed.shape[:-1], v.shape[-1]))
    last = int(first.max())
    # where all rows have padding, the last blocks are beyond every tile
    seen_blocks = -(-(last + tiles * TILE) // key_block)
    for number in range(min(keys.shape[2], seen_blocks)):
        # tiles before the block do not see it
        seeing = slice(max(0, (number * key_block - last) // TILE), None)
        own = tuple(x[:, :, seeing] for x in (largest, total, mean))
        block = number * key_block + torch.arange(key_block, device=q.device)
        seen = block <= positions[:, :, seeing]
        if scores.window is not None:
            seen &= block > positions[:, :, seeing] - scores.window
        _add_block(placed[:, :, seeing], keys[:, :, number].mT, values[:, :, number], seen, scores.cap, *own)
    mean = (mean / total).unflatten(3, (TILE, -1)).permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)
    return mean[rows, places].transpose(1, 2).to(v.dtype)


def _cut_blocks(x: Tensor, key_block: int) -> Tensor:
    """Pad keys or values to whole blocks, [B, Hkv, m, D] -> [B, Hkv, blocks, key_block, D]."""
    return pad(x, (0, 0, 0, -x.shape[2] % key_block)).unflatten(2, (-1, key_block))


def _add_block(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, cap: float | None, largest: Tensor, total: Tensor, mean: Tensor
) -> None:
    """Add a block of keys to the online softmax, in place.

    q: [B, Hkv, tiles, R, D]; k: [B, Hkv, D, block]; v: [B, Hkv, block, Dv]; seen: [B, 1, tiles, R, block]. largest and
    total: [B, Hkv, tiles, R, 1]; mean: [B, Hkv, tiles, R, Dv], not yet divided by total.
    """
    scores = _multiply(q, k)
    if cap is not None:
        scores = compute_elementwise(torch.tanh, scores / cap) * cap
    scores = scores.masked_fill(~seen, LOWEST)
    higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
    scale = compute_elementwise(torch.exp, largest - higher)
    # the second mask is for a query that has seen no key so far
    shares = compute_elementwise(torch.exp, scores - higher).masked_fill(~seen, 0.0)
    largest.copy_(higher)
    total.mul_(scale).add_(shares.sum(-1, keepdim=True))
    mean.mul_(scale).add_(_multiply(shares, v))


def _multiply(tiles: Tensor, matrix: Tensor) -> Tensor:
    """Multiply tiles by the matrix of their heads, [B, Hkv, tiles, R, K] x [B, Hkv, K, N] -> [B, Hkv, tiles, R, N]."""
    matrices = matrix[:, :, None].expand(-1, -1, tiles.shape[2], -1, -1)
    # contiguous: the kernel of a product also depends on the layout in memory
    product = torch.bmm(tiles.flatten(0, 2).contiguous(), matrices.flatten(0, 2).contiguous())
    return product.view(*tiles.shape[:-1], -1)


class _OtherBackward(torch.autograd.Function):
    """Function with the values of an attention, and the gradient of another that differs by rounding."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        usual: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.usual = usual
        return attend(query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            attended = ctx.usual(*inputs)
        return *torch.autograd.grad(attended, inputs, grad), None, None
