"""The data that flows: Prompt -> Sample -> Batch -> (Policy, Tokens).

A Prompt is one dataset row. A Sample is one token sequence with a record of which tokens the policy
chose. A Batch is many Samples laid end to end for one forward pass. Tokens are the learnt tokens of
a Batch, and all a loss ever sees of it.

Four policies, four names, everywhere:
    logp          the policy being trained, now; carries gradient
    rollout_logp  the engine that sampled the token, at the time
    prox_logp     the trainer's policy when this step began
    ref_logp      the frozen reference model
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

LossNorm = Literal["token", "sequence", "sequence_sum", "constant", "prompt"]
Stop = Literal["eos", "length", "turns"]
Message = dict[str, str]
"""{"role": ..., "content": ...}"""

Scored = Literal["prox_logp", "ref_logp", "teacher_logp", "values"]
"""A per-token quantity the trainer can score before credit is assigned."""
Column = Scored | Literal["returns", "reference_point"]
"""Those, and what credit may add to them."""


Rows = Literal["conversations", "pairs", "labelled"]
"""What a supervised row is: one conversation, a chosen and a rejected answer, or an answer and whether it is good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    id: str
    """Unique per row of a data set ("gsm8k/17")."""
    messages: list[Message]
    answer: str = ""
    """Ground truth for the reward; the policy never sees it."""
    extra: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    """Name of the data set it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence. Every list has the same length L; entry t describes token t.

    There is no prompt/response split: in a multi-turn episode the two alternate, so `mask` is the
    only thing that says which tokens to learn from.
    """

    prompt: Prompt
    token_ids: list[int]
    mask: list[bool]
    """True where the policy chose the token."""
    rollout_logp: list[float]
    """The engine's log-probability at the sampling temperature where mask is True, 0.0 elsewhere."""
    versions: list[int]
    """Policy version that sampled the token where mask is True, -1 elsewhere."""
    stop: Stop = "eos"
    reward: float | None = None
    """Weighted sum of the parts; None when there is no reward, or when the reward failed."""
    parts: dict[str, float] = field(default_factory=dict)
    """The reward's named parts, before weighting."""
    failure: str = ""
    """Why this sample has no reward: the last line of the traceback, or "timeout"."""
    advantage: list[float] | None = None
    """Credit of each token, assigned by the algorithm once per step; [L]."""
    columns: dict[Column, list[float]] = field(default_factory=dict)
    """What the trainer scored because the algorithm declared that it needs it, and what credit added; each [L]."""
    left_out: list[bool] | None = None
    """True where the algorithm does not learn from a token that the policy chose; [L]."""

    def __post_init__(self) -> None:
        lengths = {
            "token_ids": len(self.token_ids),
            "mask": len(self.mask),
            "rollout_logp": len(self.rollout_logp),
            "versions": len(self.versions),
            **{name: len(values) for name, values in self.columns.items()},
        }
        if self.advantage is not None:
            lengths["advantage"] = len(self.advantage)
        if self.left_out is not None:
            lengths["left_out"] = len(self.left_out)
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the lists of a Sample must have one length, found {lengths}")

    @property
    def learnt(self) -> list[bool]:
        """[L], True where the token is trained on. Nothing predicts the first one; a failed sample teaches nothing."""
        if self.failure:
            return [False] * len(self.mask)
        chosen = [False, *self.mask[1:]]
        if self.left_out is None:
            return chosen
        return [yes and not out for yes, out in zip(chosen, self.left_out, strict=True)]


Group = list[Sample]
"""Samples of one prompt; group-relative baselines are taken over it."""


@dataclass(slots=True, kw_only=True)
class Tokens:
    """The M learnt tokens of one micro-batch, in order. Nothing else reaches a loss.

    `weight` is the whole normalisation story: it is computed once per update on the whole update's
    samples, before any split, and the update's loss is always `(weight * loss).sum()`. Cutting the
    update differently therefore cannot change the gradient.
    """

    seq_ids: Tensor
    """[M] int64, which sequence of the micro-batch the token belongs to: 0..S-1."""
    weight: Tensor
    """[M] float, share of this token in the update's loss."""
    advantage: Tensor | None = None
    """[M] float, detached."""
    rollout_logp: Tensor | None = None
    """[M] float, detached; as are the next three."""
    prox_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    values: Tensor | None = None
    """[M] float, detached: the value model's, of the state before each token, when the step began."""
    returns: Tensor | None = None
    """[M] float, detached: what the value model is to learn."""
    reference_point: Tensor | None = None
    """[M] float, detached: KTO's z0, the same at every token of an update."""
    group_ids: Tensor | None = None
    """[M] int64, which group of the micro-batch the token belongs to; None where groups may be cut apart."""
    source_ids: Tensor | None = None
    """[M] int64, which data set of a mixture the token comes from; None without a mixture."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """Scalars summed over the whole update, all ranks; see Algorithm.totals."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """One micro-batch: S sequences laid end to end, T input tokens, M of which predict a learnt token."""

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, restarts at 0 where a sequence begins."""
    seq_ids: Tensor
    """[T] int64, 0..S-1."""
    at: Tensor
    """[M] int64, the input positions whose next token is learnt."""
    labels: Tensor
    """[M] int64, those next tokens."""
    tokens: Tokens

    def to(self, device: torch.device | str) -> Batch:
        return replace(_move(self, device), tokens=_move(self.tokens, device))


def _move(record: Any, device: torch.device | str) -> Any:
    moved = {f.name: v.to(device) for f in fields(record) if isinstance(v := getattr(record, f.name), Tensor)}
    return replace(record, **moved)


@dataclass(slots=True, kw_only=True)
class Policy:
    """What one forward pass says about the learnt tokens. float32, with gradient."""

    logp: Tensor
    """[M] log-probability of each learnt token at the sampling temperature."""
    entropy: Tensor | None = None
    """[M] entropy in nats of the distribution the token was drawn from; only if the algorithm needs it."""
