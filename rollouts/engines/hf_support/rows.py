"""Requests of the hf engine, and the batch inputs of the next forward pass.

In the first pass, requests with equal tokens and images share a row, such as the samples of a group. Rows are padded on
the left. Image inputs go only into this pass, since later passes contain sampled tokens, which are never images.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from core.types.allowed_tokens import AllowedTokens
from core.types.arrays import Ids
from core.types.images import PlacedImage
from core.types.routes import Routes, dtype_for, extend
from modeling.image_blocks import ImageBlocks, mark_types
from rollouts.engines.base import Completion, CompletionStop, make_completion

if TYPE_CHECKING:
    from modeling.images.processor import ImageProcessor

Asked = tuple[list[int], Sequence[PlacedImage]]
"""Tokens and images of a request."""


@dataclass(slots=True)
class EngineRequest:
    """Waiting or running request."""

    token_ids: list[int]
    images: Sequence[PlacedImage]
    max_new_tokens: int
    uniform: np.random.Generator
    """Random generator, drawn from once per token. So a request's tokens do not depend on the rest of the batch."""
    done: asyncio.Future[Completion]
    new_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[Ids] = field(default_factory=list)
    """Ids of the set that each new token was drawn from, with truncation."""
    routes: list[Routes] = field(default_factory=list[Routes])
    """Experts of the tokens that were inputs so far, [n, layers, k] each."""

    def make_completion(self, stop: CompletionStop) -> Completion:
        """Return the tokens sampled so far."""
        # the last token was never an input
        routes = extend(np.concatenate(self.routes), len(self.so_far)) if self.routes else None
        return make_completion(self.new_ids, self.logp, self.versions, self.kept, stop=stop, routes=routes)

    @property
    def so_far(self) -> list[int]:
        """Tokens of prompt and completion."""
        return self.token_ids + self.new_ids


@dataclass(slots=True)
class Rows:
    """Inputs of the next forward pass over the live requests."""

    ids: Tensor
    """[B, L] int64, tokens that are not yet in the cache."""
    mask: Tensor
    """[B, all] int64, 0 at the padding on the left."""
    positions: Tensor
    """[B, L] int64, or [3, B, L] for M-RoPE models if a row has images."""
    cache: DynamicCache
    media: dict[str, Tensor]
    """Vision inputs of all rows in order. Empty once they are in the cache."""
    shared: Tensor | None = None
    """[requests] int64, the row of each request before the first pass. None: one row per request."""

    def arguments(self) -> dict[str, Any]:
        """Return the model's arguments for the next pass, with logits of the last position alone."""
        return {
            "input_ids": self.ids,
            "attention_mask": self.mask,
            "position_ids": self.positions,
            "past_key_values": self.cache,
            "use_cache": True,
            # only the last position is sampled from; logits of all, [B, L, V], would need far more memory
            "logits_to_keep": 1,
            **self.media,
        }

    def split(self, logits: Tensor) -> Tensor:
        """Give each request a separate row after the first pass. Return the logits, [B, V] -> [requests, V]."""
        if self.shared is None:
            return logits
        at, self.shared = self.shared, None
        self.keep_rows(at)
        return logits[at]

    def append_tokens(self, chosen: Tensor) -> None:
        """Set `chosen`, [B] int64, as the tokens of the next pass."""
        # M-RoPE text tokens have equal positions in all three axes, one above the largest so far.
        last = self.positions.amax(-1) if self.positions.ndim == 2 else self.positions.amax((0, 2)).expand(3, -1)
        self.ids, self.positions, self.media = chosen[:, None], last[..., None] + 1, {}
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(chosen), 1)], -1)

    def keep_rows(self, at: Tensor) -> None:
        """Select rows; at: [B] int64. A row may be repeated."""
        self.ids, self.mask = self.ids[at], self.mask[at]
        # rows are the second to last axis, with and without M-RoPE
        self.positions = self.positions[..., at, :]
        # not batch_select_indices, which recurrent layers of a hybrid model do not have
        cache: Any = self.cache  # declared with a LongTensor, which no function of torch returns
        cache.reorder_cache(at)


def keep_sets(requests: Sequence[EngineRequest], kept: Tensor, allowed_tokens: AllowedTokens) -> None:
    """Add the kept sets [B, A] of the next tokens to their requests."""
    columns = kept.nonzero()[:, 1]  # in order of the rows
    ids = allowed_tokens.to_ids(columns).to("cpu", torch.int32).numpy()
    ends = np.cumsum(kept.sum(-1).tolist())
    for request, own in zip(requests, np.split(ids, ends[:-1]), strict=True):
        request.kept.append(own)


def keep_routes(requests: Sequence[EngineRequest], chosen: Tensor, rows: Rows, *, experts: int) -> None:
    """Add the routes of a forward pass, [B * L, layers, k], to the requests, whose newest token is in the last column.

    experts: number of experts of a block. Call it before `Rows.split`. After a weight update earlier tokens are
    computed again, and keep their first routes.
    """
    of_rows = chosen.to("cpu").numpy().astype(dtype_for(experts)).reshape(*rows.ids.shape, *chosen.shape[1:])
    places = range(len(requests)) if rows.shared is None else rows.shared.tolist()
    for request, place in zip(requests, places, strict=True):
        added = len(request.so_far) - sum(map(len, request.routes))
        # a copy, since a view would keep the whole batch
        request.routes.append(of_rows[place, -added:].copy())


def make_rows(
    requests: Sequence[Asked],
    cache: DynamicCache,
    processor: ImageProcessor | None,
    device: str,
    blocks: ImageBlocks | None = None,
) -> Rows:
    """Build inputs with all tokens of the requests, for an empty cache.

    requests: tokens and images of each. processor: image processor of a vision model. blocks: image tokens that attend
    in both directions.
    """
    requests, shared = _find_equal(requests)
    width = max(len(ids) for ids, _ in requests)
    pads = [width - len(ids) for ids, _ in requests]
    pad = _find_pad(processor)
    # padding on the left puts every row's newest token into the last column
    ids = torch.tensor([[pad] * n + ids for n, (ids, _) in zip(pads, requests, strict=True)], dtype=torch.int64)
    mask = torch.tensor([[0] * n + [1] * (width - n) for n in pads], dtype=torch.int64)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # [B, L]; padding gets 0 and is masked
    media: dict[str, Tensor] = {}
    placed = [place for _, places in requests for place in places]
    if placed:
        assert processor is not None, "a model without a vision part is given no images"
        media = processor.collate([place.image for place in placed])
        if blocks is not None:
            media |= mark_types(blocks, ids)
        if any(place.grid is not None for place in placed):
            positions = torch.stack([_spread(len(ids), images, width) for ids, images in requests], 1)
    return Rows(
        ids=ids.to(device),
        mask=mask.to(device),
        positions=positions.to(device),
        cache=cache,
        media={name: tensor.to(device) for name, tensor in media.items()},
        shared=torch.tensor(shared, device=device) if len(requests) < len(shared) else None,
    )


def _find_equal(requests: Sequence[Asked]) -> tuple[list[Asked], list[int]]:
    """Return distinct requests, and each request's index among them."""
    found: dict[tuple[object, ...], int] = {}
    different: list[Asked] = []
    shared: list[int] = []
    for ids, places in requests:
        key = (*ids, *((place.begin, place.end, place.image.hash) for place in places))
        if key not in found:
            found[key] = len(different)
            different.append((ids, places))
        shared.append(found[key])
    return different, shared


def _find_pad(processor: ImageProcessor | None) -> int:
    """Return a padding token that is no image placeholder."""
    taken = frozenset() if processor is None else processor.placeholder_ids
    # the model would look for image features at a placeholder, even at a masked position
    return next(i for i in range(len(taken) + 1) if i not in taken)


def _spread(length: int, images: Sequence[PlacedImage], width: int) -> Tensor:
    """Return the M-RoPE positions of one row, [3, width] int64, with zeros for padding."""
    from modeling.images.rope_positions import find_rope_ids

    return torch.nn.functional.pad(torch.from_numpy(find_rope_ids(length, images)), (width - length, 0))
