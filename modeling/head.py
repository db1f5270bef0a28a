"""Language-model head in chunks: scores of many tokens without all of their logits at once.

The logits of 16k tokens over a vocabulary of 150k take 5 GiB in bfloat16, and their gradient as much again. A chunk has
the logits of a few hundred tokens, and the backward pass computes them again.

All chunks are computed inside a single call of the head in the model's forward pass, for which every loaded model gets
a `ScoringHead`. So ZeRO-3 gathers the head's weight once in the forward and once in the backward pass, however many
chunks a rank has. Ranks with different numbers of chunks, or none, make the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from core.allocator import mapping_tensors
from core.errors import UserError

COPIES_AT_ONCE = 3
"""Tensors of the logits' size if computed at once: logits, and their gradient in pieces and as a whole."""
BYTES_PER_LOGIT = 20
"""Memory per logit of a chunk in the backward pass: float32, and four more tensors of autograd."""
BYTES_OF_MEASURES = 60
"""The same for all measures of the distribution: some fifteen more tensors."""

Score = Callable[[Tensor, slice], Tensor]
"""Function of the logits [m, V] of m tokens and their place among the M; k numbers per token, [k, m]."""


class ScoringHead(nn.Linear):
    """Language-model head that can compute another function of the hidden states than logits."""

    compute: Callable[[Tensor], Tensor] | None = None
    is_checked = False
    """True once `score_in_chunks` has seen what the model does after this head."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.compute is None else self.compute(input)

    @contextmanager
    def computing(self, compute: Callable[[Tensor], Tensor]) -> Generator[None]:
        """Compute `compute(hidden)` instead of logits during the body."""
        self.compute = compute
        try:
            yield
        finally:
            self.compute = None


def use_scoring_head(model: nn.Module) -> None:
    """Replace a model's plain linear head by a `ScoringHead` with the same parameters.

    Call it before a library wraps the model: hooks on the old head would be lost.
    """
    hf: Any = model
    head = hf.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    # on the meta device: the parameters of the old head are put in, so tied embeddings stay tied
    ours = ScoringHead(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    ours.weight, ours.bias = head.weight, head.bias
    hf.set_output_embeddings(ours.train(head.training))


def choose_chunk(model: nn.Module, n_tokens: int, mib: int, *, measured: bool = False) -> int | None:
    """Return the chunk size in tokens; None if all logits and their gradient fit into `mib` MiB, or mib is 0.

    measured: whether measures are computed of the logits.

    It ignores whether gradients are on, so that scoring and training give equal log-probabilities to the bit.
    """
    if not mib:
        return None
    hf: Any = model
    vocabulary, budget = hf.config.get_text_config().vocab_size, mib * 2**20
    if COPIES_AT_ONCE * hf.dtype.itemsize * n_tokens * vocabulary <= budget:
        return None
    # one token at least, even where the budget is smaller than its logits
    return max(1, budget // ((BYTES_PER_LOGIT + measured * BYTES_OF_MEASURES) * vocabulary))


def split_rows(n: int, size: int) -> list[slice]:
    """Return the places of chunks of at most `size` rows; an empty chunk for none.

    >>> split_rows(3, 2), split_rows(0, 2)
    ([slice(0, 2, None), slice(2, 3, None)], [slice(0, 0, None)])
    """
    return [slice(i, min(i + size, n)) for i in range(0, n, size)] or [slice(0, 0)]


def score_in_chunks(
    module: nn.Module,
    model: nn.Module,
    inputs: dict[str, Tensor],
    at: tuple[Tensor, Tensor],
    score: Score,
    size: int,
) -> Tensor:
    """Run the model; return the scores [k, M] of the M tokens predicted by the hidden states in (rows, columns).

    The model receives only the first token's logits instead of all. Its changes to them must equal `finish_logits`,
    which is applied to every chunk.
    """
    head = get_head(model)
    scored: list[Tensor] = []
    first: list[Tensor] = []

    def score_finished(logits: Tensor, rows: slice) -> Tensor:
        return score(finish_logits(model, logits), rows)

    def compute_scores(hidden: Tensor) -> Tensor:
        chosen = hidden[at]  # [M, H]
        first.append(_compute_first(head, chosen))
        return _Chunks.apply(chosen, score_finished, size, *head.parameters())

    def keep_scores(_module: nn.Module, _args: Any, scores: Tensor) -> Tensor:
        scored.append(scores)
        return first[0].requires_grad_(scores.requires_grad)

    # The last hook of the head: ZeRO-3's, which gathers the weight again for the backward pass, has seen the scores.
    hook = head.register_forward_hook(keep_scores)
    try:
        with head.computing(compute_scores):
            finished = module(**inputs, use_cache=False).logits
    finally:
        hook.remove()
    _check_finished(model, head, first[0], finished)
    return _AlsoThrough.apply(scored[0], finished)


@torch.no_grad()
def compute_hidden(module: nn.Module, model: nn.Module, inputs: dict[str, Tensor], at: tuple[Tensor, Tensor]) -> Tensor:
    """Run the model without its head; return the hidden states [M, H] at (rows, columns), without gradient."""
    head = get_head(model)
    kept: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        chosen = hidden[at]
        kept.extend((chosen, _compute_first(head, chosen)))
        return kept[1]

    with head.computing(keep):
        finished = module(**inputs, use_cache=False).logits
    _check_finished(model, head, kept[1], finished)
    return kept[0]


def get_head(model: nn.Module) -> ScoringHead:
    """Return the head of a model whose scores can be computed in chunks. Raises UserError for any other."""
    hf: Any = model
    head = hf.get_output_embeddings()
    if not isinstance(head, ScoringHead):
        raise _unknown(model, "its head is no plain linear layer")
    return head


@torch.no_grad()
def _compute_first(head: ScoringHead, chosen: Tensor) -> Tensor:
    # [1, 1, V] passes through the model's code after the head like any logits, at the cost of one token
    return linear(chosen[:1], head.weight, head.bias)[None]


def _check_finished(model: nn.Module, head: ScoringHead, first: Tensor, finished: Tensor) -> None:
    """Raise UserError unless the model changes its logits after the head as `finish_logits` does."""
    # One token is enough to tell: an unknown change after the head would make all log-probabilities wrong. The host
    # waits for the answer, so only the first pass is asked.
    if head.is_checked:
        return
    if not torch.allclose(finished.float(), finish_logits(model, first).float(), rtol=1e-3, equal_nan=True):
        raise _unknown(model, "it changes its logits after the head in a way that is not known here")
    head.is_checked = True


def finish_logits(model: nn.Module, logits: Tensor) -> Tensor:
    """Apply the model's changes to logits after the head: Gemma's soft cap, Granite's scaling."""
    hf: Any = model
    config = hf.config.get_text_config()
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / scaling
    return logits


def _unknown(model: nn.Module, reason: str) -> UserError:
    config: Any = model.config
    return UserError(
        f"trainer.logits_mib: the logits of a micro-batch do not fit, and a {config.model_type} model's cannot be "
        f"computed in chunks, because {reason}: set trainer.logits_mib=0, which computes all at once, and lower "
        "trainer.micro_batch_tokens if memory runs out"
    )


class _AlsoThrough(torch.autograd.Function):
    """Return the scores; the backward pass also reaches the model's output, with a zero gradient.

    ZeRO-3 records the modules that a backward pass reaches, and compares the lists of all ranks. So a rank with chunks
    must reach the same modules as a rank without.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, logits: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_zeros(ctx.shape, dtype=ctx.dtype)


class _Chunks(torch.autograd.Function):
    """scores = score(hidden W^T + b, labels), chunk by chunk; the backward pass recomputes each chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, score: Score, size: int, *parameters: Tensor) -> Tensor:  # [M, H] -> [k, M]
        ctx.save_for_backward(hidden, *parameters)
        ctx.score, ctx.size = score, size
        places = split_rows(len(hidden), size)
        with _freeing(hidden):
            return torch.cat([score(linear(hidden[rows], *parameters), rows) for rows in places], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *parameters = ctx.saved_tensors
        needs_hidden, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        sums = [_Sum(p) if needed else None for p, needed in zip(parameters, needs, strict=True)]
        of_hidden: list[Tensor] = []
        # only the inputs were kept: the logits of a chunk exist once more, and are freed before the next chunk
        with _freeing(hidden):
            for rows in split_rows(len(hidden), ctx.size):
                chunk = hidden[rows]
                of_logits = _differentiate_logits(ctx.score, linear(chunk, *parameters), rows, grad[:, rows])
                if needs_hidden:
                    of_hidden.append(of_logits @ parameters[0])
                for total in sums:
                    if total is not None:
                        total.add(of_logits, chunk)
        return torch.cat(of_hidden) if needs_hidden else None, None, None, *(s and s.round() for s in sums)


class _Sum:
    """Gradient of a weight [V, H] or a bias [V], added up over chunks in float32.

    A sum of many chunks in bfloat16 would lose the precision of a single matrix product.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.dtype = parameter.dtype
        self.total = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        self.part = None if self.dtype == self.total.dtype else torch.empty_like(parameter)
        """Memory for the product of a chunk; one for all chunks."""

    def add(self, of_logits: Tensor, hidden: Tensor) -> None:
        """Add the part of a chunk. of_logits: [m, V]. hidden: [m, H]."""
        if self.total.ndim == 1:
            self.total += of_logits.sum(0)
        elif self.part is None:
            self.total.addmm_(of_logits.T, hidden)
        else:
            self.total += torch.mm(of_logits.T, hidden, out=self.part)

    def round(self) -> Tensor:
        return self.total.to(self.dtype)


def _freeing(hidden: Tensor) -> AbstractContextManager[None]:
    """Return a context in which a CPU's memory of a chunk is free for the next one."""
    return mapping_tensors() if hidden.device.type == "cpu" else nullcontext()


def _differentiate_logits(score: Score, logits: Tensor, rows: slice, grad: Tensor) -> Tensor:
    """Return the gradient of a chunk's logits, [m, V]."""
    # a leaf, so that the pass ends at the chunk and frees its logits at once
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        scores = score(leaf, rows)
    return torch.autograd.grad(scores, leaf, grad)[0]
