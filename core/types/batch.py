"""Types of one forward pass: Batch -> (Policy, Tokens). See core/types/samples.py for their origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from core.types.arrays import list_fields, with_tensors, without_tensors
from core.types.images import EncodedImage
from core.types.kept_sets import KeptTokens


class MissingColumn(AttributeError):
    """Error of a loss that reads a column its algorithm does not require."""


READ_BY_HOST = ("parents", "lengths")
"""Fields of a Batch that stay on the CPU."""

_absent: Any = None
"""Default of a column. `Tokens` deletes absent columns, so that reading them raises MissingColumn."""


@dataclass(slots=True, kw_only=True)
class Tokens:
    """Trained tokens of one micro-batch, M in order. A loss receives nothing else.

    `weight` contains the whole normalisation. It is computed once per update over all samples, before any split. The
    loss of an update is always `(weight * loss).sum()`, so the gradient does not depend on the split.

    Only the columns that the algorithm requires are present; reading any other raises MissingColumn.
    """

    weight: Tensor
    """[M] float, the token's share of the update's loss."""
    seq_ids: Tensor = _absent
    """[M] int64, number of the token's sequence in the micro-batch: 0..S-1. All samples of an episode count as one
    sequence. Absent if an episode of several samples may be split; see Algorithm.whole_episodes."""
    advantage: Tensor = _absent
    """[M] float, detached; advantage of each token."""
    rollout_logp: Tensor = _absent
    """[M] float, detached; log-probability under the engine that sampled the token, when it was sampled."""
    prox_logp: Tensor = _absent
    """[M] float, detached; log-probability under the trainer's policy at the start of the step."""
    ref_logp: Tensor = _absent
    """[M] float, detached; log-probability under the frozen reference model."""
    teacher_logp: Tensor = _absent
    """[M] float, detached; log-probability under the teacher."""
    values: Tensor = _absent
    """[M] float, detached; value model's output for the state before each token, at the start of the step."""
    returns: Tensor = _absent
    """[M] float, detached; targets of the value model."""
    reference_point: Tensor = _absent
    """[M] float, detached; KTO's z0, the same at every token of an update."""
    group_ids: Tensor = _absent
    """[M] int64, number of the token's group in the micro-batch; present only if groups are never split."""
    source_ids: Tensor = _absent
    """[M] int64, number of the token's data set; present only for a mixture."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[M] float each, detached; columns whose names an algorithm chose. Read as `tokens.column(name)`."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """Totals of the whole update, all ranks; see Algorithm.totals."""
    first: dict[str, Tensor] = field(default_factory=dict)
    """[M] each, the values whose order statistics are in `totals`, as the forward pass of the totals computed them; NaN
    where a token did not count. Compare these with a threshold: computed again, a last bit may differ."""

    def __post_init__(self) -> None:
        for name in list_fields(Tokens):
            if getattr(self, name) is None:
                # Deleted, so that a loss that reads it fails with the name of the column, and not in arithmetic with
                # None.
                delattr(self, name)

    def __getattr__(self, name: str) -> Any:  # called for absent attributes only
        if name in list_fields(Tokens):
            raise _describe_missing(name)
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        return with_tensors, (Tokens, without_tensors(self))

    def has(self, name: str) -> bool:
        """Tell whether a column is there."""
        return name in self.columns or (name in list_fields(Tokens) and hasattr(self, name))

    def column(self, name: str) -> Tensor:
        """Return a column, [M], by its name. Raises MissingColumn if it is not there."""
        if not self.has(name):
            raise _describe_missing(name)
        return self.columns[name] if name in self.columns else getattr(self, name)

    def replace(self, **changes: Any) -> Tokens:
        """Return the same tokens with some fields changed."""
        # dataclasses.replace would read absent columns too, and raise.
        there = {name: getattr(self, name) for name in list_fields(Tokens) if self.has(name)}
        return Tokens(**(there | changes))


def _describe_missing(name: str) -> MissingColumn:
    return MissingColumn(
        f"tokens.{name} is not there; name it in required_columns of the algorithm (compute_advantages sets "
        "returns, reference_point and advantage; whole_groups adds group_ids; if an episode has several "
        "samples, whole_episodes adds seq_ids; at observed tokens of a term there are no columns, and at demonstrated "
        "tokens no rollout_logp)"
    )


@dataclass(slots=True, kw_only=True)
class TermTokens:
    """Tokens of one term of an objective, m of the M of a micro-batch."""

    at: Tensor
    """[m] int64, their places among the M."""
    tokens: Tokens
    """With the weights of this term, and with the columns that exist at all of them."""

    def __reduce__(self) -> Any:
        return with_tensors, (TermTokens, without_tensors(self))

    def to(self, device: torch.device | str) -> TermTokens:
        """Return the same on `device`."""
        return TermTokens(at=self.at.to(device), tokens=self.tokens.replace(**_move_tensors(self.tokens, device)))


@dataclass(slots=True, kw_only=True)
class Batch:
    """Micro-batch: S segments end to end, T input tokens, and M trained tokens that they predict.

    A segment is usually a whole sequence. If sequences share prefixes (data_feeds/packing/prefix_tree.py), a segment is
    a part of one or several. It then attends to all ancestors (parent, grandparent, ...) as if they preceded it in the
    row.

    The [T] and [M] numbers are int64 on a trainer, since torch wants that in an index. Until `to` they are int32.
    """

    input_ids: Tensor
    """[T] int64, input tokens of all segments."""
    position_ids: Tensor
    """[T] int64, position in the sequence; a segment starts at 0 or continues the parent's positions."""
    segment_ids: Tensor
    """[T] int64, number of the segment: 0..S-1."""
    parents: Tensor
    """[S] int64, the segment continued by each segment, with a smaller number; -1 at the start of a sequence. Stays on
    the CPU."""
    lengths: Tensor
    """[S] int64, input tokens of each segment. Stays on the CPU."""
    at: Tensor
    """[M] int64, input positions whose next token is trained on. A shared position may occur several times: the last
    token of a prompt predicts the first token of every reply."""
    labels: Tensor
    """[M] int64, ids of these next tokens."""
    tokens: Tokens
    images: tuple[EncodedImage, ...] = ()
    """Images of the input tokens, in their order; an image shared by sequences occurs once."""
    has_bare_images: bool = False
    """Whether image tokens without images attend like those of an image, as in a layout probe. Otherwise they are
    text, as a policy may sample it."""
    rope_ids: Tensor | None = None
    """[3, T] int64, positions by time, row and column, for model families with three position axes (M-RoPE)."""
    media: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the vision tower, by argument name of the model's forward(): `pixel_values`, `image_grid_thw`, ... The
    process of the forward pass computes them from `images`."""
    kept: KeptTokens | None = None
    """Sets of ids that the trained tokens were sampled from, over which their softmax is taken; None: no truncation."""
    routes: Tensor | None = None
    """[T, layers, k] int16, experts that the engine chose for each input token in each block of experts; UNKNOWN where
    there is no record (core/types/routes.py). None: no sample has routes."""
    terms: dict[str, TermTokens] = field(default_factory=dict)
    """Tokens of each term, by its name; empty for an algorithm without terms. Otherwise `tokens` are those of all
    terms, with no other column than weight and numbers. Their weight is that of the first term that has the token."""
    compared: dict[str, Tokens] = field(default_factory=dict)
    """The same tokens with the columns of compared losses, by the name of the loss; see the key `compare_losses`."""

    def __reduce__(self) -> Any:
        return with_tensors, (Batch, without_tensors(self))

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on `device`, int32 as int64, but for those that only the host reads."""
        tokens = self.tokens.replace(**_move_tensors(self.tokens, device))
        compared = {name: seen.replace(**_move_tensors(seen, device)) for name, seen in self.compared.items()}
        media = {name: tensor.to(device) for name, tensor in self.media.items()}
        terms = {name: term.to(device) for name, term in self.terms.items()}
        kept = None if self.kept is None else self.kept.to(device)
        moved = _move_tensors(self, device)
        return replace(self, **moved, tokens=tokens, terms=terms, compared=compared, media=media, kept=kept)


def _move_tensors(record: Batch | Tokens, device: torch.device | str) -> dict[str, Any]:
    # Absent columns raise MissingColumn, an AttributeError, for which getattr returns the default.
    # to read a tensor from a GPU, the host waits until the GPU has done all that it was given
    there = ((name, getattr(record, name, None)) for name in list_fields(type(record)) if name not in READ_BY_HOST)
    moved: dict[str, Any] = {name: _move(v, device) for name, v in there if isinstance(v, Tensor)}
    if isinstance(record, Tokens):
        moved["columns"] = {name: v.to(device) for name, v in record.columns.items()}
    return moved


def _move(tensor: Tensor, device: torch.device | str) -> Tensor:
    # widened there: half of the bytes are moved
    moved = tensor.to(device)
    return moved.long() if moved.dtype == torch.int32 else moved


@dataclass(slots=True, kw_only=True)
class Policy:
    """Output of one forward pass at the trained tokens: float32 (float64 for a float64 model), with gradient."""

    logp: Tensor
    """[M] log-probability of each token at the sampling temperature."""
    entropy: Tensor | None = None
    """[M] entropy, in nats, of the distribution that the token was drawn from; None if the algorithm does not need it.
    """
    measures: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """[M] each, the algorithm's measures of that distribution. Read as `policy.<name>`."""

    def __getattr__(self, name: str) -> Tensor:  # called for absent attributes only
        # unpickling asks for attributes before there are any
        if name.startswith("__") or name in list_fields(Policy):
            raise AttributeError(name)
        if name not in self.measures:
            raise MissingColumn(
                f"policy.{name} is not there; name it in the algorithm's measures, and not in required_columns, which "
                f"computes it before the update instead. Measures of this pass: {', '.join(self.measures) or 'none'}"
            )
        return self.measures[name]

    def apply(self, change: Callable[[Tensor], Tensor]) -> Policy:
        """Return the policy with every tensor changed, such as detached."""
        entropy = None if self.entropy is None else change(self.entropy)
        return Policy(
            logp=change(self.logp), entropy=entropy, measures={name: change(v) for name, v in self.measures.items()}
        )

    def list_tensors(self) -> list[Tensor]:
        """Return all tensors, in the same order for every policy of a pass."""
        return [self.logp, *([] if self.entropy is None else [self.entropy]), *self.measures.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Row layout that all models of a trainer support."""

    padded: bool
    """Whether rows are padded to the longest of the micro-batch."""
    shares_prefixes: bool
    """Whether samples of a group share common prefixes; never with padded rows."""
    measured: str = field(default="", compare=False)
    """Measured layouts of the policy, in a line (modeling/layout_probe.py)."""
