"""Numbers of a token from its logits: log-probability and measures of the distribution, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.kept_sets import KeptTokens
from core.types.measures import At, Measure, Stored, check_rows
from core.types.samples import Policy, Tokens
from modeling.head import finish_logits, split_rows

CHUNK_LOGITS = 2**24
"""Number of logits upcast to float32 at a time: 64 MiB."""


TeacherLogits = Callable[[slice], Tensor]
"""Function of the place of m of the M tokens; a frozen model's logits of them, [m, V], without gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """Hidden states of a frozen model at the trained tokens, and the head: enough to compute the distribution."""

    model: nn.Module
    """The Hugging Face model, for what it does to logits after the head."""
    hidden: Tensor
    """[M, H], without gradient."""
    weight: Tensor
    """[V, H]"""
    bias: Tensor | None = None
    """[V]"""

    @torch.no_grad()
    def compute_logits(self, rows: slice) -> Tensor:
        """Compute the logits of some of the tokens, [m, V]."""
        return finish_logits(self.model, linear(self.hidden[rows], self.weight, self.bias))


def normalize(logits: Tensor) -> Tensor:
    """Return the log-probabilities of restricted logits, [m, A]; the bits are those of `Softmax.compute`."""
    return logits - logits.logsumexp(-1, keepdim=True)


NO_COLUMNS = Tokens(weight=torch.zeros(0)).column
"""Reader of columns where there are none: it raises MissingColumn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """Softmax at the sampling temperature over the allowed tokens, and the numbers computed of it at M tokens."""

    labels: Tensor
    """[M] int64, token ids."""
    temperature: float
    allowed_tokens: AllowedTokens = EVERY_TOKEN
    kept: KeptTokens | None = None
    """Sets of the M tokens, in place of allowed_tokens, which they are subsets of."""
    measures: Mapping[str, Measure] = field(default_factory=dict[str, Measure])
    read_column: Callable[[str], Tensor] = NO_COLUMNS
    """Function of a column's name; the column at the M tokens."""
    teachers: Mapping[str, TeacherLogits] = field(default_factory=dict[str, TeacherLogits])
    """By column of the frozen model; see `Measure.teachers`."""

    def compute(self, logits: Tensor, rows: slice) -> Tensor:
        """Compute log-probability and measures of some of the tokens from their logits, [m, V] -> [1 + k, m]."""
        # divided by the temperature before the softmax, so that logp is that of the distribution the engine samples
        # from
        support = self._find_support(rows)
        labels = support.to_columns(self.labels[rows])
        if not self.measures:
            return _LogProb.apply(logits, labels, support, self.temperature)[None]
        logits = support.restrict(logits, self.temperature)  # [m, A]
        # computed alike with and without measures, so that scoring and training agree to the bit
        logp, norm = _choose(logits, labels)
        s = logits - norm[:, None]
        at = At(
            labels=labels,
            read_column=lambda name: self.read_column(name)[rows],
            compute_teacher=lambda name: self._compute_teacher(name, rows),
            read_stored=lambda name: self._read_stored(name, rows),
        )
        return torch.stack([logp, *(check_rows(name, m.compute(s, at), s) for name, m in self.measures.items())])

    def compute_at_once(self, logits: Tensor) -> Tensor:
        """Compute the same of all logits, [M, V] -> [1 + k, M], without a full float32 copy of them."""
        # checkpoint() recomputes each chunk in the backward pass; otherwise autograd would keep all float32 chunks.
        compute = partial(checkpoint, self.compute, use_reentrant=False) if self.measures else self.compute
        size = max(1, CHUNK_LOGITS // logits.shape[-1])
        # split, not slices: the gradient of each slice would be as large as all logits
        chunks = zip(logits.split(size), split_rows(len(logits), size), strict=True)
        return torch.cat([compute(own, rows) for own, rows in chunks], dim=-1)

    def name_rows(self, computed: Tensor) -> Policy:
        """Return the rows of [1 + k, M] under their names."""
        logp, *rest = computed
        named = dict(zip(self.measures, rest, strict=True))
        return Policy(logp=logp, entropy=named.pop("entropy", None), measures=named)

    @torch.no_grad()
    def _compute_teacher(self, name: str, rows: slice) -> Tensor:
        if name not in self.teachers:
            there = ", ".join(sorted(self.teachers)) or "none"
            raise UserError(
                f"a measure reads at.teacher({name!r}), and those that it declares are: {there}; name it in "
                f"Measure(..., teachers=({name!r},))"
            )
        # as `compute` does for the policy: a model beside itself has a divergence of exactly 0
        return normalize(self._find_support(rows).restrict(self.teachers[name](rows), self.temperature))

    def _find_support(self, rows: slice) -> AllowedTokens | KeptTokens:
        return self.allowed_tokens if self.kept is None else self.kept.select(rows)

    def _read_stored(self, name: str, rows: slice) -> Stored:
        ids, logp = (self.read_column(f"{name}_{part}")[rows] for part in ("ids", "logp"))
        live = ids >= 0
        if self.allowed_tokens.allowed is not None:
            raise UserError("stored distributions are of all tokens: leave rollout.allowed_tokens out")
        # finite numbers in empty slots, which a product with `live` removes
        return Stored(columns=ids.masked_fill(~live, 0).long(), logp=logp.masked_fill(~live, 0.0), live=live)


def _choose(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the labels and the norms, [m] each, of restricted logits [m, A]."""
    norm = logits.logsumexp(-1)
    return logits.gather(-1, labels[:, None])[:, 0] - norm, norm


class _LogProb(torch.autograd.Function):
    """Log-probabilities [m] of the labels, from logits [m, V] over a support.

    The backward pass needs only the norms, because exp(logit - norm) is the softmax. Autograd would keep the float32
    logits, or compute the norms again, and add two gradients of their size.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, support: AllowedTokens | KeptTokens, temperature: float
    ) -> Tensor:
        logp, norm = _choose(support.restrict(logits, temperature), labels)
        ctx.save_for_backward(logits, labels, norm)
        ctx.support, ctx.temperature = support, temperature
        return logp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, norm = ctx.saved_tensors
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            restricted = ctx.support.restrict(leaf, ctx.temperature)
        each = grad[:, None]
        # the gradient of the label's logit minus that of the norm
        of_restricted = (restricted.detach() - norm[:, None]).exp_().mul_(-each).scatter_add_(-1, labels[:, None], each)
        return torch.autograd.grad(restricted, leaf, of_restricted)[0], None, None, None
