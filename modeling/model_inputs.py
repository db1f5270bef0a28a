"""Inputs of a model: the rows of a flat Batch, padded or packed.

Only the attention kernel sees the batch's layout. `padded` gives every sequence a row; `packed` puts all sequences in
one row and passes their boundaries, or the forest of shared segments (modeling/segments.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from core.patches import read_attention
from core.types.kept_sets import KeptTokens
from core.types.routes import PADDING
from core.types.samples import Batch
from modeling.attention import TAKE_BORDERS, TAKE_SEGMENTS
from modeling.image_blocks import ImageBlocks, find_ends, find_image_blocks, mark_types
from modeling.segments import Segments
from modeling.sequence_parallel import SequenceGroup

Layout = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of a batch that this rank computes: everything, or a slice of the row."""

    inputs: dict[str, Any]
    """Model inputs."""
    at: tuple[Tensor, Tensor]
    """Row and column of the positions that predict the part's trained tokens, [m] each."""
    labels: Tensor
    """Trained tokens of the part, [m]."""
    mine: Tensor
    """[M] bool, True for the batch's trained tokens that are in this part."""
    kept: KeptTokens | None
    """Kept sets of the part's trained tokens."""
    routes: Tensor | None = None
    """[P, layers, k] int16, routes of all positions of the rows, row by row; PADDING where there is no token."""


def lay_out_part(model: nn.Module, batch: Batch, layout: Layout, sequence_group: SequenceGroup | None) -> Part:
    """Lay out the rows of a batch; with a sequence group, this rank's slice of the row."""
    (row, column), inputs = _lay_out(model, batch, layout)
    if sequence_group is None:
        if read_attention(model.config.get_text_config()) in TAKE_SEGMENTS:
            # Without a mask transformers looks for one in all positions, and the host waits for the answer. One of four
            # axes goes to the kernel as it is, and the kernel ignores an empty one.
            inputs["attention_mask"] = batch.input_ids.new_empty((0, 0, 0, 0), dtype=torch.bool)
        every = torch.ones_like(batch.labels, dtype=torch.bool)
        at = (row[batch.at], column[batch.at])
        routes = None if batch.routes is None else _place_routes(batch.routes, row, column, inputs["input_ids"])
        return Part(inputs=inputs, at=at, labels=batch.labels, mine=every, kept=batch.kept, routes=routes)
    if inputs.keys() != {"input_ids", "position_ids", "segments"} or batch.rope_ids is not None:
        raise ValueError(f"ranks share packed rows of text with their segments, found {sorted(inputs)}")
    own = sequence_group.slice_row(len(batch.input_ids))
    inputs = {
        "input_ids": own.take(inputs["input_ids"], fill=choose_padding(model)),
        "position_ids": own.take(inputs["position_ids"], fill=0),
        "segments": Segments.of_batch(batch, sequence_group),
    }
    mine = own.find_own(batch.at)
    # positions in the slice, since the model sees no other part of the row
    columns = batch.at[mine] - own.begin
    kept = None if batch.kept is None else batch.kept.select(mine.cpu())
    at = (torch.zeros_like(columns), columns)
    # the last axis is that of positions
    routes = None if batch.routes is None else own.take(batch.routes.movedim(0, -1), fill=PADDING).movedim(-1, 0)
    return Part(inputs=inputs, at=at, labels=batch.labels[mine], mine=mine, kept=kept, routes=routes)


def _place_routes(routes: Tensor, row: Tensor, column: Tensor, input_ids: Tensor) -> Tensor:
    """Return the routes of flat tokens, [T, layers, k], at their positions in the rows, [P, layers, k]."""
    placed = routes.new_full((input_ids.numel(), *routes.shape[1:]), PADDING)
    placed[row * input_ids.shape[1] + column] = routes
    return placed


def _lay_out(model: nn.Module, batch: Batch, layout: Layout) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Return the position of every flat token in the model's rows, ([T] row, [T] column), and the model's inputs.

    Tokens of images have the same order in both layouts, row by row, so `media` fits both.
    """
    if batch.images and not batch.media:
        raise ValueError("a batch with images has no media: modeling/images/media.py makes them")
    rope = batch.rope_ids
    if layout == "padded":
        # No mask: the padding is on the right, and no token attends to its right.
        if (batch.parents >= 0).any():
            raise ValueError("rows that share prefixes cannot be padded: set trainer.share_prefixes=off")
        n_rows, width = len(batch.parents), int(batch.lengths.max())
        inputs = {"input_ids": batch.input_ids.new_full((n_rows, width), choose_padding(model))}
        # without shared prefixes each segment is a sequence, and so a row
        inputs["input_ids"][batch.segment_ids, batch.position_ids] = batch.input_ids
        if rope is not None:
            inputs["position_ids"] = rope.new_zeros(3, n_rows, width)
            inputs["position_ids"][:, batch.segment_ids, batch.position_ids] = rope
        rows = torch.arange(n_rows).repeat_interleave(width)
        inputs |= batch.media | _mark_images(model, batch, inputs["input_ids"], rows)
        return (batch.segment_ids, batch.position_ids), inputs
    row = torch.zeros_like(batch.segment_ids)
    column = torch.arange(len(row), device=row.device)
    inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
    if rope is not None:  # [4, 1, T]: a mask is made of the first, and positions are the rest
        inputs["position_ids"] = torch.cat([inputs["position_ids"], rope])[:, None]
    inputs |= batch.media | _sequence_boundaries(model, batch)
    return (row, column), inputs | _mark_images(model, batch, batch.input_ids[None], batch.segment_ids)


def _mark_images(model: nn.Module, batch: Batch, input_ids: Tensor, sequences: Tensor) -> dict[str, Any]:
    """Return the inputs for attention among the tokens of an image, of rows [B, T] with sequences [B * T]."""
    blocks = _find_blocks(model, batch)
    if blocks is None:
        return {}
    if read_attention(model.config.get_text_config()) not in TAKE_SEGMENTS:
        return mark_types(blocks, input_ids)
    ends = find_ends(blocks, input_ids.flatten(), sequences)
    return {} if ends is None else {"image_ends": ends}


def _find_blocks(model: nn.Module, batch: Batch) -> ImageBlocks | None:
    """Return the image tokens of a batch that attend in both directions; None if its attention is causal."""
    # Engines mark the tokens of images alone. With model.images=off a policy may sample such tokens, and they are text.
    return find_image_blocks(model.config) if batch.images or batch.has_bare_images else None


def choose_padding(model: nn.Module) -> int:
    """Return a token id that is no image placeholder."""
    # A placeholder in the padding would take up the features of a real image.
    return 1 if getattr(model.config, "image_token_id", None) == 0 else 0


def _sequence_boundaries(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the inputs that separate packed sequences: explicit boundaries or a mask, never only position_ids."""
    config = model.config.get_text_config()
    kernel = read_attention(config)
    segments = Segments.of_batch(batch)
    if segments.are_shared and kernel not in TAKE_SEGMENTS:
        raise ValueError(
            f"a {config.model_type} model with {kernel} attention cannot share prefixes: set trainer.share_prefixes=off"
        )
    if kernel in TAKE_SEGMENTS:
        return {"segments": segments}
    blocks = _find_blocks(model, batch)
    if blocks is not None and (batch.input_ids == blocks.token).any():
        raise ValueError(
            f"packed rows under {kernel} attention are causal, and the tokens of an image attend in both directions "
            "in this model: set trainer.layout=padded"
        )
    if kernel in TAKE_BORDERS:
        # int32 is the kernel's type
        ends = nn.functional.pad(batch.lengths.cumsum(0), (1, 0)).int().to(batch.input_ids.device)
        longest = int(batch.lengths.max())
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and int(batch.lengths.max()) > window:
        raise ValueError(
            f"packed rows under {kernel} attention take one mask for all layers, and this "
            f"model's sliding window of {window} is shorter than a sequence of {int(batch.lengths.max())} tokens: "
            "set trainer.layout=padded"
        )
    # The last resort costs T x T booleans, so such kernels get padded rows unless asked (layout_probe.py).
    may_look = (batch.segment_ids[:, None] == batch.segment_ids[None, :]).tril()[None, None]  # [1, 1, T, T]
    if kernel == "eager":  # adds its mask to the scores
        return {"attention_mask": torch.zeros_like(may_look, dtype=model.dtype).masked_fill(~may_look, -torch.inf)}
    return {"attention_mask": may_look}
