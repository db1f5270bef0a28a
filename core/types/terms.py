"""Terms of an objective: several losses of one algorithm, each on tokens of its own.

    sampled        tokens that a policy chose and that are trained on
    observed       tokens of the environment after the first sampled token, such as tool results
    demonstrated   the reply of a demonstration

No other module decides which tokens a term has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from core.errors import UserError
from core.types.arrays import BOOLS, Mask
from core.types.batch import Policy, Tokens
from core.types.samples import LossNorm, Sample

Where = Literal["sampled", "observed", "demonstrated"] | Callable[[Sample], Mask]
"""Tokens of a term. A function returns them, [L] bool; those that nobody trains on are left out (find_trainable)."""
TokenLoss = Callable[[Policy, Tokens], tuple[Tensor, dict[str, Tensor]]]
"""Loss of each token, [M], and metrics, [M] each; see Algorithm.loss."""
Has = Literal["all", "no rollout", "none"]
"""Columns of a term's tokens: all; all but `rollout_logp`; or none but the numbers of sequence, group and source."""


@dataclass(frozen=True, slots=True)
class Term:
    """Loss with tokens, denominator and coefficient of its own; see Algorithm.terms."""

    name: str
    """Name of the term in the log: `term/NAME/loss`."""
    loss: TokenLoss
    on: Where = field(default="sampled", kw_only=True)
    """Tokens of the term. The loss of sampled tokens is corrected as that of an algorithm without terms."""
    norm: LossNorm | None = field(default=None, kw_only=True)
    """Unit of equal weight; None: the algorithm's `loss_norm`."""
    coef: float = field(default=1.0, kw_only=True)
    """Factor of the term in the objective. It does not enter the denominator."""
    among: Where | None = field(default=None, kw_only=True)
    """Tokens that the denominator counts, if they are more than the term's own."""
    sources: frozenset[str] | None = field(default=None, kw_only=True)
    """Data sets of the term; None: all."""


def find_term_tokens(sample: Sample, where: Where, sources: frozenset[str] | None = None) -> Mask:
    """Return True for the tokens of a term, [L]. Raises UserError if a function returns anything but a mask."""
    if sources is not None and sample.prompt.source not in sources:
        return np.zeros(len(sample.token_ids), dtype=BOOLS)
    if where == "sampled" or where == "demonstrated":
        wanted = (sample.origin == "demonstration") == (where == "demonstrated")
        return sample.loss_mask if wanted else np.zeros(len(sample.token_ids), dtype=BOOLS)
    if where == "observed":
        return find_observed(sample)
    mask = where(sample)
    if getattr(mask, "dtype", None) != BOOLS or mask.shape != (len(sample.token_ids),):
        raise UserError(
            f"the tokens of a term must be a mask of {len(sample.token_ids)} booleans, one per token of the sample, "
            f"found {mask!r:.80}"
        )
    return mask & find_trainable(sample)


def find_observed(sample: Sample) -> Mask:
    """Return True for the tokens after the first sampled one that the policy did not choose, [L]."""
    if sample.origin == "demonstration" or not sample.action_mask.any():
        return np.zeros(len(sample.token_ids), dtype=BOOLS)
    after = np.arange(len(sample.token_ids)) > int(sample.action_mask.argmax())
    return after & ~sample.action_mask & find_trainable(sample)


def find_trainable(sample: Sample) -> Mask:
    """Return True for all but the first token, excluded tokens and images, [L]; none of a failed sample."""
    allowed = np.ones(len(sample.token_ids), dtype=BOOLS)
    if sample.failure:
        return ~allowed
    allowed[:1] = False  # nothing predicts it
    if sample.excluded is not None:
        allowed &= ~sample.excluded
    for place in sample.images:
        allowed[place.begin : place.end] = False
    return allowed


def find_columns(sample: Sample, mask: Mask) -> Has:
    """Tell which columns exist at these tokens of a sample."""
    if (mask & ~sample.loss_mask).any():
        return "none"
    return "no rollout" if sample.origin == "demonstration" and mask.any() else "all"
