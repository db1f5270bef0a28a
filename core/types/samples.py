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

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from core.types.arrays import (
    BOOLS,
    DOUBLE,
    INTS,
    SINGLE,
    Floats,
    Ids,
    Mask,
    check_column,
    is_equal,
    list_fields,
    to_column,
)
from core.types.batch import Batch as Batch  # where users look for it
from core.types.batch import MissingColumn as MissingColumn
from core.types.batch import Policy as Policy
from core.types.batch import Tokens as Tokens
from core.types.images import PlacedImage, check_places
from core.types.messages import ROLES as ROLES
from core.types.messages import Message as Message
from core.types.messages import ToolSpec as ToolSpec
from core.types.turns import Spans, check_colocation, find_runs

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
    """Side that the policy played, in a game in which it plays several; see core.types.episodes.split_players."""
    images: tuple[PlacedImage, ...] = ()
    """Images that its tokens stand for, in the order of the tokens."""

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
        if self.images:
            check_places(self.images, n)
        if self.turns or self.turn_rewards or self.turn_numbers:
            check_colocation(self.spans, self.turn_rewards, self.turn_numbers, self.action_mask)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return all(is_equal(getattr(self, name), getattr(other, name)) for name in list_fields(Sample))

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
        if self.failure or self.excluded is not None:
            return int(np.count_nonzero(self.loss_mask))
        return int(np.count_nonzero(self.action_mask[1:]))  # the same, without a copy

    def with_advantage(self, advantage: float | Floats) -> Sample:
        """Return the sample with an advantage: a number for all of its tokens, or an array [L]."""
        each = np.empty(len(self.token_ids), dtype=self.float_dtype)
        each[:] = advantage
        each.setflags(write=False)
        same = object.__new__(Sample)  # `replace` would check all other columns again, for every sample of a step
        for name in list_fields(Sample):
            object.__setattr__(same, name, each if name == "advantage" else getattr(self, name))
        return same


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
    for name in others.keys() & {"turn_rewards", "turn_numbers", "images"}:
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
