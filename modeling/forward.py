"""Forward pass: from a flat Batch to the log-probabilities of the trained tokens.

A model's head, including its scaling of logits, runs only on the positions of trained tokens. modeling/model_inputs.py
lays out the rows.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.measures import Measure
from core.types.samples import Batch, Policy
from modeling.head import choose_chunk, compute_hidden, score_in_chunks
from modeling.model_inputs import Layout, Part, lay_out_part
from modeling.sequence_parallel import SequenceGroup
from modeling.softmax import Softmax, TeacherLogits


class AppliesRoutes(Protocol):
    """Model whose routers take recorded routes (modeling/route_counts.py)."""

    def over(self, routes: Tensor, *, counted: bool) -> AbstractContextManager[None]:
        """Apply routes [P, layers, k] to the forward pass in the body."""
        ...


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
    replay: AppliesRoutes | None = None,
) -> Policy:
    """Compute log-probability and measures of every trained token, [M] float32, with gradient if gradients are on.

    module: the callable (DeepSpeed's engine, or the model itself). model: the Hugging Face causal LM inside it.
    log-softmax is in float32 at the sampling temperature, by which the engine also divides its logits. logits_mib:
    memory for logits, above which they are computed in chunks; 0 computes all at once. allowed_tokens: tokens of the
    softmax, equal to those that the engine samples from; all tokens for SFT and preferences, which train on given text.
    No trained token may be outside (AllowedTokens.check_labels). With `batch.kept` each token's softmax is over its
    kept set instead. sequence_group: ranks that compute this batch together; each returns the whole result. teachers:
    logits of the frozen models that the measures read, by column; see `KeptStates`. measured: True if any pass of the
    run computes measures, so that all have the same chunks. replay: the model's, to apply `batch.routes`.
    """
    part = lay_out_part(model, batch, layout, sequence_group)

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
        with _routed(part, replay), _head_only_at(model, *part.at):
            logits = module(**part.inputs, use_cache=False).logits  # [1, M, V]
        # squeeze, not [0]: the gradient of an index would be a copy as large as all logits
        own = softmax.compute_at_once(logits.squeeze(0))
    else:
        with _routed(part, replay):
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
    part = lay_out_part(model, batch, layout, sequence_group)
    return compute_hidden(module, model, part.inputs, part.at)


def compute_values(
    module: nn.Module,
    batch: Batch,
    *,
    layout: Layout,
    model: nn.Module,
    sequence_group: SequenceGroup | None = None,
) -> Tensor:
    """Compute the outputs of a value or reward model at the position that predicts each trained token, [L, M] float32.

    A value model has L = 1: the value of the state before the token. sequence_group: as in `forward`.
    """
    part = lay_out_part(model, batch, layout, sequence_group)
    seen: list[Tensor] = []
    hook = model.score.register_forward_hook(lambda _, args, out: seen.append(out))  # every position's, before pooling
    try:
        module(**part.inputs, use_cache=False)
    finally:
        hook.remove()
    [values] = seen  # [rows, columns, L]
    row, column = part.at
    own = values[row, column].T.float()  # [L, m]
    return own if sequence_group is None else sequence_group.gather(own, part.mine)


def _routed(part: Part, replay: AppliesRoutes | None) -> AbstractContextManager[None]:
    if replay is None or part.routes is None:
        return nullcontext()
    # Counted in the passes of training alone, and not for an idle rank, whose batch repeats a sample of another's.
    return replay.over(part.routes, counted=torch.is_grad_enabled() and part.mine.numel() > 0)


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
