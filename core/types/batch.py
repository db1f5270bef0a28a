"""The types of one forward pass: Batch -> (Policy, Tokens). core/types/samples.py says where they come from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from core.types.arrays import list_fields, with_tensors, without_tensors
from core.types.images import EncodedImage


class MissingColumn(AttributeError):
    """Error of a loss that reads a column which its algorithm does not require."""


_absent: Any = None
"""Default of a column. `Tokens` removes what is absent, so that reading it raises MissingColumn."""


@dataclass(slots=True, kw_only=True)
class Tokens:
    """The M tokens of one micro-batch that are trained on, in order. Nothing else reaches a loss.

    `weight` holds the whole normalisation. It is computed once per update on all samples of the update, before any
    split, and the loss of the update is always `(weight * loss).sum()`. So splitting the update differently cannot
    change the gradient.

    A column that the algorithm requires is there; reading any other raises MissingColumn.
    """

    weight: Tensor
    """[M] float, share of this token in the update's loss."""
    seq_ids: Tensor = _absent
    """[M] int64, number of the token's sequence in the micro-batch: 0..S-1. All samples of an episode are one sequence,
    and absent where an episode of several samples may be split; see Algorithm.whole_episodes."""
    advantage: Tensor = _absent
    """[M] float, detached; advantage of each token."""
    rollout_logp: Tensor = _absent
    """[M] float, detached; log-probability under the engine that sampled the token, at the time."""
    prox_logp: Tensor = _absent
    """[M] float, detached; log-probability under the trainer's policy when this step began."""
    ref_logp: Tensor = _absent
    """[M] float, detached; log-probability under the frozen reference model."""
    teacher_logp: Tensor = _absent
    """[M] float, detached; log-probability under the teacher."""
    values: Tensor = _absent
    """[M] float, detached; the value model's output for the state before each token, when the step began."""
    returns: Tensor = _absent
    """[M] float, detached; targets of the value model."""
    reference_point: Tensor = _absent
    """[M] float, detached; KTO's z0, the same at every token of an update."""
    group_ids: Tensor = _absent
    """[M] int64, number of the token's group in the micro-batch; only where groups are never split."""
    source_ids: Tensor = _absent
    """[M] int64, number of the token's data set; only with a mixture."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """Scalars summed over the whole update, all ranks; see Algorithm.totals."""

    def __post_init__(self) -> None:
        for name in list_fields(Tokens):
            if getattr(self, name) is None:
                delattr(self, name)

    def __getattr__(self, name: str) -> Any:  # called for absent attributes only
        if name in list_fields(Tokens):
            raise MissingColumn(
                f"tokens.{name} is not there: name it in required_columns of the algorithm (returns, reference_point "
                "and advantage are set by compute_advantages, group_ids come with whole_groups; where an episode has "
                "several samples, seq_ids come with whole_episodes)"
            )
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        return with_tensors, (Tokens, without_tensors(self))

    def has(self, name: str) -> bool:
        """Tell whether a column is there."""
        return hasattr(self, name)

    def replace(self, **changes: Any) -> Tokens:
        """Return the same tokens with some fields changed."""
        there = {name: getattr(self, name) for name in list_fields(Tokens) if self.has(name)}
        return Tokens(**(there | changes))


@dataclass(slots=True, kw_only=True)
class Batch:
    """Micro-batch: S segments end to end, T input tokens, which predict the M tokens that are trained on.

    A segment is a whole sequence. Only where sequences share their beginnings (data_feeds/packing/prefix_tree.py) it
    is a part
    of one or more, and attends to its parent, its parent's parent and so on, as if they were before it in the row.
    """

    input_ids: Tensor
    """[T] int64, input tokens of all segments."""
    position_ids: Tensor
    """[T] int64, position in the sequence; a segment begins at 0, or goes on from its parent's end."""
    segment_ids: Tensor
    """[T] int64, number of the segment: 0..S-1."""
    parents: Tensor
    """[S] int64, the segment that each continues, with a smaller number; -1 where a sequence begins."""
    at: Tensor
    """[M] int64, input positions whose next token is trained on. One that sequences share may be there several times:
    the last token of a prompt predicts the first token of every reply."""
    labels: Tensor
    """[M] int64, ids of these next tokens."""
    tokens: Tokens
    images: tuple[EncodedImage, ...] = ()
    """Images that the input tokens stand for, in their order; one that sequences share is there once."""
    rope_ids: Tensor | None = None
    """[3, T] int64, positions by time, row and column, for families whose positions have three axes (M-RoPE)."""
    media: dict[str, Tensor] = field(default_factory=dict)
    """What the model's vision part reads, by the names of its forward(): `pixel_values`, `image_grid_thw`, ... It is
    made of `images` in the process that computes the forward pass."""
    compared: dict[str, Tokens] = field(default_factory=dict)
    """The same tokens as other losses see them, by the name of the loss; see the key `compare_losses`."""

    def __reduce__(self) -> Any:
        return with_tensors, (Batch, without_tensors(self))

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with every tensor on `device`."""
        tokens = self.tokens.replace(**_move_tensors(self.tokens, device))
        compared = {name: seen.replace(**_move_tensors(seen, device)) for name, seen in self.compared.items()}
        media = {name: tensor.to(device) for name, tensor in self.media.items()}
        return replace(self, **_move_tensors(self, device), tokens=tokens, compared=compared, media=media)


def _move_tensors(record: Batch | Tokens, device: torch.device | str) -> dict[str, Any]:
    there = ((name, getattr(record, name, None)) for name in list_fields(type(record)))
    return {name: v.to(device) for name, v in there if isinstance(v, Tensor)}


@dataclass(slots=True, kw_only=True)
class Policy:
    """Output of one forward pass at the trained tokens. float32 (float64 for a float64 model), with gradient."""

    logp: Tensor
    """[M] log-probability of each token at the sampling temperature."""
    entropy: Tensor | None = None
    """[M] entropy in nats of the distribution the token was drawn from; only if the algorithm needs it."""
