"""Attention of one query set over one key set, with what some families do to scores: a cap, or sinks.

    cap     score = cap * tanh(score / cap), before the mask and the softmax (Gemma 2)
    sinks   a number per head that takes part in the softmax as the score of one more key, whose value is zero (gpt-oss)

Torch's kernels take neither. A cap is computed in plain torch, so it needs memory for all scores. A sink becomes a key:
the query gets one more component, the sink, the key of the sink is a one there, and all other keys are zero there. So
torch's kernel computes it, with a mask that is the same for all heads, and the sink gets a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from modeling.sequence_parallel import SequenceGroup

ALIGNED = 8
"""Components added for a sink; torch's fast kernels take multiples of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Changes of a layer to scores before the softmax."""

    scaling: float | None
    """Factor of the scores; None: one over the root of the head's dimension."""
    window: int | None
    cap: float | None = None
    sinks: Tensor | None = None
    """[H], a score per head."""

    @property
    def leading(self) -> int | None:
        """Columns that `attend` reads before those of the keys; None if it takes no mask for plain causal attention."""
        if self.sinks is not None:
            return 1
        return None if self.cap is None else 0

    def of_rank(self, together: SequenceGroup) -> Scores:
        """Return the same for the heads of this rank (SequenceGroup.to_heads)."""
        own = None if self.sinks is None else self.sinks.unflatten(0, (together.size, -1))[together.place]
        return replace(self, sinks=own)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Compute attention: [B, H, n, D] queries, [B, Hkv, m, D] keys and values -> [B, H, n, Dv].

    mask: [n, leading + m], or None for plain causal attention. Raises ValueError for a cap and sinks together, which no
    known family has.
    """
    if scores.sinks is not None and scores.cap is not None:
        raise ValueError("attention does not compute softcap and s_aux together")
    if scores.cap is not None:
        return _attend_capped(q, k, v, mask, scores.scaling, scores.cap)
    if scores.sinks is not None:
        return _attend_with_sinks(q, k, v, mask, scores.scaling, scores.sinks)
    return _attend_plainly(q, k, v, mask, scores.scaling)


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        # torch then shares the heads of keys itself, without the copies of repeat_interleave
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, cap: float) -> Tensor:
    assert mask is not None
    copies = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
    # float32: near a cap of 50 bfloat16 knows only every fourth of a unit
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)  # [B, H, n, m]
    capped = torch.tanh(scores / cap) * cap
    return capped.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v


def _attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, sinks: Tensor
) -> Tensor:
    assert mask is not None
    width, width_of_values = q.shape[-1], v.shape[-1]
    scaling = width**-0.5 if scaling is None else scaling
    # the score of the sink's key is this component times one, times the scaling
    of_sink = (sinks.to(q.dtype) / scaling)[:, None, None].expand(*q.shape[:-1], 1)
    q = pad(torch.cat([q, of_sink], -1), (0, ALIGNED - 1))
    k, v = (pad(x, (0, ALIGNED, 1, 0)) for x in (k, v))  # zeros: the sink comes first, and has no value
    k[..., 0, width] = 1.0
    return _attend_plainly(q, k, v, mask, scaling)[..., :width_of_values]
