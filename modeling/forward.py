"""Forward pass: from a flat Batch to the log-probabilities of the trained tokens.

Only the attention kernel sees the batch's layout. `padded` gives every sequence a row; `packed` puts all sequences in
one row and passes their boundaries, or the forest of shared segments (modeling/segments.py). A model's head, including
its scaling of logits, runs only on the positions of trained tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from core.patches import read_attention
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.kept_sets import KeptTokens
from core.types.measures import Measure
from core.types.samples import Batch, Policy
from modeling.attention import BY_SEQUENCE, TAKE_BORDERS
from modeling.head import choose_chunk, compute_hidden, score_in_chunks
from modeling.segments import Segments
from modeling.sequence_parallel import SequenceGroup
from modeling.softmax import Softmax, TeacherLogits

Layout = Literal["padded", "packed"]


def forward(
    module: nn.Module,
    model: nn.Module,
    batch: Batch,
    *,
    layout: Layout,
    temperature: float,
    logits_mib: int = 0,
    allowed_tokens: AllowedTokens = EVERY_TOKEN,
    sequence_group: SequenceGroup | None = None,
    measures: Mapping[str, Measure] = MappingProxyType({}),
    teachers: Mapping[str, TeacherLogits] = MappingProxyType({}),
    measured: bool = False,
) -> Policy:
    """Compute log-probability and measures of every trained token, [M] float32, with gradient if gradients are on.

    module: the callable (DeepSpeed's engine, or the model itself). model: the Hugging Face causal LM inside it.
    log-softmax is in float32 at the sampling temperature, by which the engine also divides its logits. logits_mib:
    memory for logits, above which they are computed in chunks; 0 computes all at once. allowed_tokens: tokens of the
    softmax, equal to those that the engine samples from; all tokens for SFT and preferences, which train on given text.
    No trained token may be outside (AllowedTokens.check_labels). With `batch.kept` each token's softmax is over its
    kept set instead. sequence_group: ranks that compute this batch together; each returns the whole result. teachers:
    logits of the frozen models that the measures read, by column; see `KeptStates`. measured: True if any pass of the
    run computes measures, so that all have the same chunks.
    """
    part = _lay_out_part(model, batch, layout, sequence_group)

    def read_column(name: str) -> Tensor:
        column = batch.tokens.column(name)
        # a choice of all tokens would wait for the device to count them
        return column if sequence_group is None else column[part.mine]

    softmax = Softmax(
        labels=part.labels,
        temperature=temperature,
        allowed_tokens=allowed_tokens,
        kept=part.kept,
        measures=measures,
        read_column=read_column,
        teachers=teachers,
    )
    size = choose_chunk(model, len(part.labels), logits_mib, measured=measured)
    if size is None:
        with _head_only_at(model, *part.at):
            logits = module(**part.inputs, use_cache=False).logits  # [1, M, V]
        # squeeze, not [0]: the gradient of an index would be a copy as large as all logits
        own = softmax.compute_at_once(logits.squeeze(0))
    else:
        own = score_in_chunks(module, model, part.inputs, part.at, softmax.compute, size)
    return softmax.name_rows(own if sequence_group is None else sequence_group.gather(own, part.mine))


def compute_states(
    module: nn.Module,
    model: nn.Module,
    batch: Batch,
    *,
    layout: Layout,
    sequence_group: SequenceGroup | None = None,
) -> Tensor:
    """Compute the hidden states that predict the trained tokens, [m, H], without gradient; see `KeptStates`.

    sequence_group: as in `forward`; the states are those of this rank's part.
    """
    part = _lay_out_part(model, batch, layout, sequence_group)
    return compute_hidden(module, model, part.inputs, part.at)


def compute_values(
    module: nn.Module,
    batch: Batch,
    *,
    layout: Layout,
    model: nn.Module,
    sequence_group: SequenceGroup | None = None,
) -> Tensor:
    """Compute the value of the state before every trained token, [M] float32, at the position that predicts it.

    sequence_group: as in `forward`.
    """
    return compute_labels(module, batch, layout=layout, model=model, sequence_group=sequence_group)[:, 0]


def compute_labels(
    module: nn.Module,
    batch: Batch,
    *,
    layout: Layout,
    model: nn.Module,
    sequence_group: SequenceGroup | None = None,
) -> Tensor:
    """Compute all outputs of a sequence classifier where `compute_values` reads the first, [M, L] float32."""
    part = _lay_out_part(model, batch, layout, sequence_group)
    seen: list[Tensor] = []
    hook = model.score.register_forward_hook(lambda _, args, out: seen.append(out))  # every position's, before pooling
    try:
        module(**part.inputs, use_cache=False)
    finally:
        hook.remove()
    [values] = seen  # [rows, columns, L]
    row, column = part.at
    own = values[row, column].float()  # [m, L]
    return own if sequence_group is None else sequence_group.gather(own, part.mine)


def compute_scores(module: nn.Module, model: nn.Module, batch: Batch, *, layout: Layout) -> Tensor:
    """Compute a number per trained token, [M], that depends on all that its position attends to.

    It is the log-probability at temperature 1. A value or reward model has none, and a new one has a head of zeros: the
    softmax is then over the components of the hidden state below its head.
    """
    hf: Any = model
    if hf.get_output_embeddings() is not None:
        return forward(module, model, batch, layout=layout, temperature=1.0).logp
    part = _lay_out_part(model, batch, layout, None)
    seen: list[Tensor] = []
    hook = hf.score.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        module(**part.inputs, use_cache=False)
    finally:
        hook.remove()
    [hidden] = seen  # [rows, columns, H]
    chosen = hidden[part.at].float().log_softmax(-1)
    return chosen.gather(-1, (part.labels % chosen.shape[-1])[:, None])[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
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


def _lay_out_part(model: nn.Module, batch: Batch, layout: Layout, sequence_group: SequenceGroup | None) -> _Part:
    (row, column), inputs = _lay_out(model, batch, layout)
    if sequence_group is None:
        if read_attention(model.config.get_text_config()) == BY_SEQUENCE:
            # Without a mask transformers looks for one in all positions, and the host waits for the answer. One of four
            # axes goes to the kernel as it is, and the kernel ignores an empty one.
            inputs["attention_mask"] = batch.input_ids.new_empty((0, 0, 0, 0), dtype=torch.bool)
        every = torch.ones_like(batch.labels, dtype=torch.bool)
        at = (row[batch.at], column[batch.at])
        return _Part(inputs=inputs, at=at, labels=batch.labels, mine=every, kept=batch.kept)
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
    return _Part(inputs=inputs, at=at, labels=batch.labels[mine], mine=mine, kept=kept)


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
        return (batch.segment_ids, batch.position_ids), inputs | batch.media
    row = torch.zeros_like(batch.segment_ids)
    column = torch.arange(len(row), device=row.device)
    inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
    if rope is not None:  # [4, 1, T]: a mask is made of the first, and positions are the rest
        inputs["position_ids"] = torch.cat([inputs["position_ids"], rope])[:, None]
    return (row, column), inputs | batch.media | _sequence_boundaries(model, batch)


def choose_padding(model: nn.Module) -> int:
    """Return a token id that is no image placeholder."""
    # A placeholder in the padding would take up the features of a real image.
    return 1 if getattr(model.config, "image_token_id", None) == 0 else 0


def _sequence_boundaries(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the inputs that separate packed sequences: explicit boundaries or a mask, never only position_ids."""
    config = model.config.get_text_config()
    kernel = read_attention(config)
    segments = Segments.of_batch(batch)
    if segments.are_shared and kernel != BY_SEQUENCE:
        raise ValueError(
            f"a {config.model_type} model with {kernel} attention cannot share prefixes: set trainer.share_prefixes=off"
        )
    if kernel == BY_SEQUENCE:
        return {"segments": segments}
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


@contextmanager
def _head_only_at(model: nn.Module, rows: Tensor, columns: Tensor) -> Generator[None]:
    """Run the language-model head only on the hidden states of these positions, as a row of M."""
    head = model.get_output_embeddings()
    # A hook, so that the model's own code after the head (soft cap, scaling) still applies.
    hook = head.register_forward_pre_hook(lambda _, args: (args[0][rows, columns][None],))
    try:
        yield
    finally:
        hook.remove()
