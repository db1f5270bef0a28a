"""Truncation: top-p, top-k and min-p, which cut improbable tokens off the distribution before sampling.

The kept set changes with the context. So the engine reports it with every token, and the trainer takes its softmax over
the reported set; it never computes the set again. After an update a sampled token may be outside of the new set, and
engines differ in ties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from core.types.allowed_tokens import LOWEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Rules of truncation, applied in this order: min-p, top-k, top-p. The defaults keep all tokens."""

    min_p: float = 0.0
    """Keep tokens with at least this fraction of the largest probability (https://arxiv.org/abs/2407.01082)."""
    top_k: int = 0
    """Keep the k most probable tokens, and all tokens as probable as the last of them; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this share of the mass that the other rules left, the token that crosses it
    included (nucleus sampling, https://arxiv.org/abs/1904.09751)."""

    @property
    def is_off(self) -> bool:
        """True if all tokens are kept."""
        return not self.min_p and not self.top_k and self.top_p == 1

    def find_kept(self, logits: Tensor) -> Tensor:
        """Return the kept set as a mask [..., A] of logits [..., A], which are divided by the temperature already.

        Tokens with a logit of -inf, or of LOWEST, are never kept. Of equal logits, top-p prefers the smaller index.

        >>> Truncation(top_k=3, top_p=0.6).find_kept(torch.tensor([2.0, 1.0, 1.0, 0.0]))
        tensor([ True,  True, False, False])
        """
        kept = logits > LOWEST
        if self.min_p:
            # p >= min_p * max p, without the softmax
            kept &= logits >= logits.amax(-1, keepdim=True) + math.log(self.min_p)
        if self.top_k:
            # of all tokens: those that min-p drops are the least probable anyway
            kept &= logits >= logits.topk(min(self.top_k, logits.shape[-1]), -1).values[..., -1:]
        if self.top_p < 1:
            # float64: in float32 the sum over a large vocabulary misses 1 noticeably
            left = logits.double().masked_fill(~kept, -math.inf).softmax(-1)
            sorted_p, order = left.sort(dim=-1, descending=True, stable=True)
            before = sorted_p.cumsum(-1) - sorted_p  # mass of the more probable tokens; the first token has 0
            kept &= torch.zeros_like(kept).scatter_(-1, order, before < self.top_p)
        return kept


EVERYTHING_KEPT = Truncation()
"""No truncation."""
