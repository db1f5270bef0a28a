"""Attention over packed rows without padding and without a mask: causal, sequence by sequence.

A packed row [1, T] holds sequences end to end; their boundaries come as `cu_seq_lens_q`, as flash attention takes
them. torch's own scaled_dot_product_attention then runs on each sequence, or on a run of equally long ones at
once. It needs no other kernel and no padding. Its name in transformers is BY_SEQUENCE.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

BY_SEQUENCE = "sdpa_by_sequence"

FAMILIES = frozenset(
    {"gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
)
"""Model families whose layers all pass boundaries and window to the kernel. All are tested."""


def attend_by_sequence_if_able(model: nn.Module) -> None:
    """Use this kernel in place of torch's, in transformers' own models of FAMILIES; do nothing for other models."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    config: Any = model.config
    ours = type(model).__module__.startswith("transformers.")
    if ours and config.model_type in FAMILIES and config._attn_implementation == "sdpa":
        AttentionInterface.register(BY_SEQUENCE, attend_by_sequence)
        AttentionMaskInterface.register(BY_SEQUENCE, flash_attention_mask)  # no mask, unless a caller brings one
        model.set_attn_implementation(BY_SEQUENCE)


def attend_by_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention: [B, H, T, D] queries, [B, Hkv, T, D] keys and values -> [B, T, H, D].

    This is the attention interface of transformers. Without boundaries each of the B rows is one sequence, padded on
    the right. A window is exact: a token sees the last `sliding_window` tokens of its sequence, itself included.
    """
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        raise ValueError(f"attention {BY_SEQUENCE} is for training: it takes neither a mask nor a cache")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        banded = sliding_window is not None and q.shape[2] > sliding_window
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_window_mask(q.shape[2], sliding_window, q.device) if banded else None,
            is_causal=not banded,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    if cu_seq_lens_q is None:
        return attend(query, key, value).transpose(1, 2), None
    runs = [(n, len(list(same))) for n, same in groupby(cu_seq_lens_q.diff().tolist())]
    # split, not slices: the gradient of each slice would be as large as the whole row
    cuts = [x.split([n * count for n, count in runs], dim=2) for x in (query, key, value)]
    parts = [
        attend(*(x[0].unflatten(1, (count, n)).transpose(0, 1) for x in run)).transpose(1, 2).flatten(0, 1)
        for (n, count), *run in zip(runs, *cuts, strict=True)
    ]  # [count * n, H, D] each
    return torch.cat(parts)[None], None


def _window_mask(n: int, window: int, device: torch.device) -> Tensor:
    """Return a mask [n, n], True where row t may attend: the last `window` tokens up to t."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril().triu(1 - window)
