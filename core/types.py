"""The types that flow: Prompt -> Sample -> Batch -> (Policy, Tokens).

A Prompt is one row of a data set. A Sample is one token sequence with a record of which tokens the policy
chose. A Batch is many Samples end to end for one forward pass. Tokens are the tokens of a Batch that are
trained on, and all that a loss sees of it.

Four policies, four names, everywhere:
    logp          the policy being trained, now; carries gradient
    rollout_logp  the engine that sampled the token, at the time
    prox_logp     the trainer's policy when this step began
    ref_logp      the frozen reference model
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from core.arrays import (
    BOOLS,
    DOUBLE,
    INTS,
    SINGLE,
    Floats,
    Ids,
    Mask,
    check_column,
    is_equal,
    to_column,
    with_tensors,
    without_tensors,
)
from core.messages import ROLES as ROLES  # where users look for it
from core.messages import Message as Message
from core.messages import ToolSpec as ToolSpec
from core.pictures import Picture, PlacedPicture, check_places
from core.turns import Spans, check_turns, find_runs

LossNorm = Literal["token", "sequence", "sequence_sum", "constant", "prompt"]
Stop = Literal["eos", "length", "turns"]

ScoredColumn = Literal["prox_logp", "ref_logp", "teacher_logp", "values"]
"""Per-token quantity that the trainer can compute before the advantages."""
Column = ScoredColumn | Literal["returns", "reference_point"]
"""Per-token quantity that the trainer computes, or that compute_advantages adds."""

Rows = Literal["conversations", "pairs", "unpaired"]
"""Kind of a supervised row: a conversation, a chosen and a rejected completion, or a completion with a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Row of a data set, without the completion."""

    id: str
    """Unique name of the row ("gsm8k/17")."""
    messages: list[Message]
    answer: str = ""
    """Ground truth for the reward; the policy never sees it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other columns of the row, for rewards and environments."""
    source: str = ""
    """Name of the data set that the row comes from."""
    tools: list[ToolSpec] = field(default_factory=list[ToolSpec])
    """Tools that the policy may call: the row's, and those of its environment."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Token sequence. Every array has the same length L; entry t is about token t.

    There is no prompt/response split: in a multi-turn episode the two alternate, so `action_mask`
    alone says which tokens the policy chose.

    Arrays are read-only, as they are where they come out of Ray: `replace` makes a sample with others. All floats of a
    sample have one dtype: float32, or float64 in tests of exactness. `make_sample` converts lists.
    """

    prompt: Prompt
    token_ids: Ids
    """[L] int32."""
    action_mask: Mask
    """[L] bool, True where the policy chose the token; False for a reply that an earlier branch of its episode has."""
    rollout_logp: Floats
    """[L] float32, the engine's log-probability at the sampling temperature where action_mask is True, 0 elsewhere."""
    versions: Ids
    """[L] int32, policy version that sampled the token where action_mask is True, -1 elsewhere."""
    stop: Stop = "eos"
    """Reason why the sample ended: a stop token or stop string, the token budget, or the number of turns."""
    reward: float | None = None
    """Weighted sum of the reward parts; None when there is no reward, or when the reward failed."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The reward's named parts, before weighting."""
    failure: str = ""
    """Reason why this sample has no reward: the last line of the traceback, or "timeout"; else ""."""
    completion: str | None = None
    """Text from the first sampled token on, decoded where it was sampled, for the sample files; None if nobody did."""
    transcript: list[Message] = field(default_factory=list[Message])
    """Messages after the prompt, for the sample files; empty for a single reply of plain text."""
    counts: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers of the episode for the log, which no reward sees: turns, tool calls. Of an episode with several samples
    the first has them."""
    advantage: Floats | None = None
    """[L] float32, advantage of each token, computed by the algorithm once per step."""
    columns: dict[Column, Floats] = field(default_factory=dict)
    """[L] float32 each: what the trainer computed because the algorithm requires it, and what the advantages added."""
    excluded: Mask | None = None
    """[L] bool, True where the algorithm does not train on a token that the policy chose."""
    episode: int | None = None
    """Number of the episode in its group. Samples of one number are branches of one episode: they have the same reward,
    and no sampled token is trained on in two of them. None: an episode of its own."""
    turns: Spans = ()
    """Token spans [begin, end) of the policy's turns in this sample, in order; together they are its sampled tokens.
    Empty: each run of sampled tokens is a turn."""
    turn_rewards: tuple[float, ...] = ()
    """Part of `reward` that each turn earned; what they leave of it came with the last turn. Empty: all came then."""
    turn_numbers: tuple[int, ...] = ()
    """Number of each turn in its episode, by time. Empty: the samples of an episode followed one another."""
    player: int = 0
    """Side that the policy played, in a game in which it plays several; see core.episodes.split_players."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures that its tokens stand for, in the order of the tokens."""

    def __post_init__(self) -> None:
        n, floats = len(self.token_ids), self.float_dtype
        check_column("token_ids", self.token_ids, INTS, n)
        check_column("action_mask", self.action_mask, BOOLS, n)
        check_column("rollout_logp", self.rollout_logp, floats, n)
        check_column("versions", self.versions, INTS, n)
        for name, column in self.columns.items():
            check_column(name, column, floats, n)
        if self.advantage is not None:
            check_column("advantage", self.advantage, floats, n)
        if self.excluded is not None:
            check_column("excluded", self.excluded, BOOLS, n)
        if self.pictures:
            check_places(self.pictures, n)
        if self.turns or self.turn_rewards or self.turn_numbers:
            check_turns(self.spans, self.turn_rewards, self.turn_numbers, self.action_mask)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return all(is_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    @property
    def float_dtype(self) -> np.dtype[Any]:
        """Dtype of every float of the sample."""
        return DOUBLE if getattr(self.rollout_logp, "dtype", SINGLE) == DOUBLE else SINGLE

    @property
    def loss_mask(self) -> Mask:
        """[L] True where the token is trained on: never the first, which nothing predicts; none of a failed sample."""
        if self.failure:
            return np.zeros(len(self.action_mask), dtype=BOOLS)
        chosen = self.action_mask.copy()
        chosen[:1] = False
        if self.excluded is not None:
            chosen &= ~self.excluded
        return chosen

    @property
    def spans(self) -> Spans:
        """Token spans of the policy's turns."""
        return self.turns or find_runs(self.action_mask)

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy chose."""
        return int(np.count_nonzero(self.action_mask))

    @property
    def n_trained(self) -> int:
        """Number of tokens that are trained on."""
        return int(np.count_nonzero(self.loss_mask))

    def with_advantage(self, advantage: float | Floats) -> Sample:
        """Return the sample with an advantage: a number for all of its tokens, or an array [L]."""
        each = np.empty(len(self.token_ids), dtype=self.float_dtype)
        each[:] = advantage
        return replace(self, advantage=each)


def make_sample(
    *,
    prompt: Prompt,
    token_ids: Any,
    action_mask: Any,
    rollout_logp: Any,
    versions: Any,
    dtype: np.dtype[Any] = SINGLE,
    **others: Any,
) -> Sample:
    """Return a Sample whose per-token fields are given as lists; its floats are of `dtype`."""
    if others.get("advantage") is not None:
        others["advantage"] = to_column(others["advantage"], dtype)
    if others.get("excluded") is not None:
        others["excluded"] = to_column(others["excluded"], BOOLS)
    if "turns" in others:
        others["turns"] = tuple((begin, end) for begin, end in others["turns"])
    for name in others.keys() & {"turn_rewards", "turn_numbers", "pictures"}:
        others[name] = tuple(others[name])
    if "columns" in others:
        others["columns"] = {name: to_column(values, dtype) for name, values in others["columns"].items()}
    return Sample(
        prompt=prompt,
        token_ids=to_column(token_ids, INTS),
        action_mask=to_column(action_mask, BOOLS),
        rollout_logp=to_column(rollout_logp, dtype),
        versions=to_column(versions, INTS),
        **others,
    )


Group = list[Sample]
"""Samples of one prompt; group-relative baselines are taken over it."""


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
        for f in fields(self):
            if getattr(self, f.name) is None:
                delattr(self, f.name)

    def __getattr__(self, name: str) -> Any:  # called for absent attributes only
        if name in {f.name for f in fields(self)}:
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
        there = {f.name: getattr(self, f.name) for f in fields(self) if self.has(f.name)}
        return Tokens(**(there | changes))


@dataclass(slots=True, kw_only=True)
class Batch:
    """Micro-batch: S segments end to end, T input tokens, which predict the M tokens that are trained on.

    A segment is a whole sequence. Only where sequences share their beginnings (data_feeds/prefix_tree.py) it is a part
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
    pictures: tuple[Picture, ...] = ()
    """Pictures that the input tokens stand for, in their order; one that sequences share is there once."""
    rope_ids: Tensor | None = None
    """[3, T] int64, positions by time, row and column, for families whose positions have three axes (M-RoPE)."""
    media: dict[str, Tensor] = field(default_factory=dict)
    """What the model's vision part reads, by the names of its forward(): `pixel_values`, `image_grid_thw`, ... It is
    made of `pictures` in the process that computes the forward pass."""
    shadows: dict[str, Tokens] = field(default_factory=dict)
    """The same tokens as other losses see them, by the name of the loss; see the key `shadow`."""

    def __reduce__(self) -> Any:
        return with_tensors, (Batch, without_tensors(self))

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with every tensor on `device`."""
        tokens = self.tokens.replace(**_move_tensors(self.tokens, device))
        shadows = {name: seen.replace(**_move_tensors(seen, device)) for name, seen in self.shadows.items()}
        return replace(self, **_move_tensors(self, device), tokens=tokens, shadows=shadows)


def _move_tensors(record: Batch | Tokens, device: torch.device | str) -> dict[str, Any]:
    return {f.name: v.to(device) for f in fields(record) if isinstance(v := getattr(record, f.name, None), Tensor)}


@dataclass(slots=True, kw_only=True)
class Policy:
    """Output of one forward pass at the trained tokens. float32, with gradient."""

    logp: Tensor
    """[M] log-probability of each token at the sampling temperature."""
    entropy: Tensor | None = None
    """[M] entropy in nats of the distribution the token was drawn from; only if the algorithm needs it."""
