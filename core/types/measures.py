"""Measures: functionals of a token's distribution, computed beside its log-probability.

A measure is a pure function of the distribution at each token. It is computed within the chunk of the head that has the
token's logits, and the backward pass computes it again, so no tensor of the size [M, V] is ever kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Largest log-probabilities of another model at m tokens, K slots each, of which some tokens fill fewer."""

    columns: Tensor
    """[m, K] int64, columns of `s`; 0 in empty slots."""
    logp: Tensor
    """[m, K] log-probabilities, rounded as they were stored; 0 in empty slots."""
    live: Tensor
    """[m, K] bool, False for empty slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Place of a chunk: what a measure may read about m tokens besides their distribution. No gradient."""

    labels: Tensor
    """[m] int64, columns of `s` of the tokens themselves."""
    read_column: Callable[[str], Tensor]
    compute_teacher: Callable[[str], Tensor]
    read_stored: Callable[[str], Stored]
    computed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Distributions of this chunk that were computed already, for several measures."""

    def column(self, name: str) -> Tensor:
        """Return a column of the tokens, [m] or [m, K]. Raises MissingColumn if it is not there."""
        return self.read_column(name)

    def teacher(self, name: str) -> Tensor:
        """Return the log-probabilities of a frozen model, [m, A], by column; see `Measure.teachers`."""
        if name not in self.computed:
            self.computed[name] = self.compute_teacher(name)
        return self.computed[name]

    def stored(self, name: str) -> Stored:
        """Return the log-probabilities that the data set stores under this name."""
        return self.read_stored(name)


@dataclass(frozen=True, slots=True)
class Measure:
    """Functional of the distribution at each token."""

    compute: Callable[[Tensor, At], Tensor]
    """f(s, at) -> [m]. s: [m, A] log-probabilities at the sampling temperature, with gradient, over the tokens that may
    be sampled (AllowedTokens). Row i of the result may depend on row i only."""
    teachers: tuple[str, ...] = ()
    """Frozen models whose distributions it reads with `at.teacher`, by their column."""


def entropy_of(s: Tensor, at: At) -> Tensor:
    """Compute the entropy in nats, [m, A] -> [m]."""
    return -(s.exp() * s).sum(-1)


ENTROPY = {"entropy": Measure(entropy_of)}
"""The measure behind `Algorithm.needs_entropy`."""


def check_rows(name: str, found: object, s: Tensor) -> Tensor:
    """Return the rows of a measure. Raises UserError unless they are floats [m]."""
    if not isinstance(found, Tensor) or found.shape != s.shape[:1] or not found.is_floating_point():
        shown = f"{list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"the measure {name} returns {shown}, expected one float per row of s, {list(s.shape[:1])}: sum over the "
            "tokens with .sum(-1), and over nothing else"
        )
    return found.to(s.dtype)


def list_teachers(measures: Mapping[str, Measure]) -> list[str]:
    """Return the frozen models that measures read, sorted."""
    return sorted({teacher for measure in measures.values() for teacher in measure.teachers})
