"""Attention over segments and its gradient, written out: what torch's kernel for variable lengths computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def compute_varlen(given: dict[str, Any]) -> list[Tensor]:
    """Return what the kernel returns for these arguments: the gradients if there is a `grad_out`, else the output."""
    ends = [given[name].tolist() for name in ("cu_seq_q", "cu_seq_k")]
    q, k, v = (given[name].float() for name in ("query", "key", "value"))
    assert len(ends[0]) == len(ends[1]) and (ends[0][-1], ends[1][-1]) == (len(q), len(k))
    left, right = given.get("window_size") or (-1, -1)
    right = 0 if given.get("is_causal") else right
    scale = given.get("scale") or q.shape[-1] ** -0.5
    grad_out, dtype = given.get("grad_out"), given["query"].dtype
    out, grads = torch.empty(q.shape), [torch.zeros(x.shape) for x in (q, k, v)]
    for a, b, c, d in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        assert b - a <= given["max_q"] and d - c <= given["max_k"]
        out[a:b], chances, parts = attend_segment(q[a:b], k[c:d], v[c:d], left=left, right=right, scale=scale)
        if grad_out is not None:
            slopes = differentiate_segment(grad_out[a:b].float(), chances, *parts, scale=scale, heads=k.shape[1])
            for grad, slope, rows in zip(grads, slopes, (slice(a, b), slice(c, d), slice(c, d)), strict=True):
                grad[rows] += slope
    if grad_out is not None:
        return [x.to(dtype) for x in grads]
    return [out.to(dtype), torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)]


def attend_segment(
    q: Tensor, k: Tensor, v: Tensor, *, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return the output [n, H, D], the probabilities [H, n, m], and q, k and v as [H, n or m, D]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    n, m = q.shape[1], k.shape[1]
    # the last query is beside the last key
    at, other = torch.arange(n)[:, None] + (m - n), torch.arange(m)[None]
    hidden = (other > at + right if right >= 0 else other < 0) | (other < at - left if left >= 0 else other < 0)
    chances = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return (chances @ v).transpose(0, 1), chances, (q, k, v)


def differentiate_segment(
    grad: Tensor, chances: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float, heads: int
) -> list[Tensor]:
    """Return the gradients of q, k and v; heads: those of the keys."""
    grad = grad.transpose(0, 1)
    of_chances = grad @ v.transpose(1, 2)
    of_scores = chances * (of_chances - (of_chances * chances).sum(-1, keepdim=True)) * scale
    slopes = [of_scores @ k, of_scores.transpose(1, 2) @ q, chances.transpose(1, 2) @ grad]
    slopes[1:] = [x.unflatten(0, (heads, -1)).sum(1) for x in slopes[1:]]
    return [x.transpose(0, 1) for x in slopes]
