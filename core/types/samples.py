"""Types that flow through a step: Prompt -> Sample -> Batch -> (Policy, Tokens).

A Prompt is a row of a data set. A Sample is a token sequence with a mask of the tokens that the policy chose. A Batch
is many Samples end to end for one forward pass. Tokens are the trained tokens of a Batch, the only input of a loss.

Four policies, with the same names everywhere:
    logp          the policy being trained, now; carries gradient
    rollout_logp  the engine that sampled the token, when it was sampled
    prox_logp     the trainer's policy at the start of the step
    ref_logp      the frozen reference model
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from core.errors import UserError
from core.text.plain_text import escape_controls
from core.types.arrays import (
    BOOLS,
    DOUBLE,
    INTS,
    SINGLE,
    Floats,
    Ids,
    Mask,
    PackedArrays,
    check_column,
    is_equal,
    list_fields,
    pack_arrays,
    to_column,
    unpack_arrays,
)
from core.types.batch import Batch as Batch  # where users look for it
from core.types.batch import MissingColumn as MissingColumn
from core.types.batch import Policy as Policy
from core.types.batch import Tokens as Tokens
from core.types.images import PlacedImage, check_places
from core.types.kept_sets import KeptSets
from core.types.messages import ROLES as ROLES
from core.types.messages import Message as Message
from core.types.messages import ToolSpec as ToolSpec
from core.types.notes import Note as Note
from core.types.routes import Routes, check_routes
from core.types.turns import Spans, check_turns, find_runs

LossNorm = Literal["token", "sequence", "sequence_sum", "constant", "prompt"]
Stop = Literal["eos", "length", "turns"]
Origin = Literal["policy", "other", "demonstration"]
"""Author of a sample: the policy in training; another policy, whose log-probabilities are known; or a reply that was
given as text."""

ScoredColumn = str
"""Name of a per-token quantity that the trainer computes before the advantages: prox_logp, ref_logp, teacher_logp,
values, or the column of a frozen model."""
Column = str
"""Name of a per-token quantity that the trainer computes or compute_advantages adds (returns, reference_point)."""

LOGP_ROUNDING = 1e-4
"""Amount by which rounding may lift a log-probability above 0."""

TOKEN_COLUMNS = ("rollout_logp", "token_ids", "versions", "action_mask")
"""Arrays that every sample has, the widest dtype first, as `pack_arrays` wants them."""
LATER_FIELDS = frozenset(
    {
        *("prompt", "completion", "transcript", "reward", "reward_parts", "failure", "counts", "notes", "log"),
        *("turn_rewards", "advantage", "columns", "excluded"),
    }
)
"""Fields of a Sample that say nothing of its tokens, or that a step adds to them."""

TOKEN_REWARDS = "token_rewards"
"""Column of the shares of `Sample.reward` that tokens earned; the last trained token earned the remainder. Samples may
lack it, and no loss sees it."""

Rows = Literal["conversations", "pairs", "unpaired", "scored"]
"""Kind of supervised row: conversation, chosen and rejected completion, completion with a label, or several completions
with rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEpisode:
    """Episode that was sampled before the run, or by another policy, to join a group of the same prompt."""

    messages: list[Message]
    """Messages after the prompt, ending in a reply."""
    completion: str
    """Decoded text from the first sampled token on."""
    token_ids: list[int] = field(default_factory=list[int])
    """Ids of prompt and episode, [L]; empty if only the text is known, which is then a demonstration."""
    logp: list[float | None] = field(default_factory=list[float | None])
    """Log-probability of each sampled token, [L]; None for tokens that were not sampled."""
    stop: Stop = "eos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Row of a data set, without the completion."""

    id: str
    """Unique name of the row ("gsm8k/17")."""
    messages: list[Message]
    answer: str = ""
    """Ground truth for the reward, hidden from the policy."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other columns of the row, for rewards and environments."""
    source: str = ""
    """Name of the row's data set."""
    tools: list[ToolSpec] = field(default_factory=list[ToolSpec])
    """Tools available to the policy: the row's and the environment's."""
    demonstration: list[Message] = field(default_factory=list[Message])
    """Messages after the prompt, ending in a reply, of a demonstration that joins the group; never sent to the engine.
    """
    recorded: tuple[RecordedEpisode, ...] = ()
    """Recorded episodes that join the group. The prompts of samples have none."""


# eq=False: the generated == would compare arrays, and an array of booleans has no truth value.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Token sequence. Every array has length L; entry t belongs to token t.

    There is no prompt/response split: in a multi-turn episode the two alternate, so only `action_mask` identifies the
    tokens that the policy chose.

    Arrays are read-only, as Ray returns them; use `replace` to change them. All floats of a sample have one dtype:
    float32, or float64 in tests of exactness. `make_sample` converts lists.
    """

    prompt: Prompt
    token_ids: Ids
    """[L] int32."""
    action_mask: Mask
    """[L] bool, True for tokens that the policy chose; False for a reply already in an earlier branch of the episode.
    """
    rollout_logp: Floats
    """[L] float32, the engine's log-probability at the sampling temperature; 0 outside action_mask."""
    versions: Ids
    """[L] int32, policy version that sampled the token; -1 outside action_mask."""
    origin: Origin = "policy"
    """Author of the chosen tokens. A demonstration has rollout_logp 0 and version -1 at all tokens."""
    stop: Stop = "eos"
    """Reason for the end of the sample: stop token or stop string, token budget, or number of turns."""
    reward: float | None = None
    """Weighted sum of the reward parts; None without a reward or if it failed."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, before weighting."""
    failure: str = ""
    """Reason for a missing reward: last line of the traceback, or "timeout"; "" otherwise."""
    completion: str | None = None
    """Decoded text from the first sampled token on, for the sample files; None if not decoded."""
    transcript: list[Message] = field(default_factory=list[Message])
    """Messages after the prompt, for the sample files; empty for a single plain-text reply."""
    counts: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers of the episode for the log, hidden from rewards: turns, tool calls. Stored in an episode's first sample.
    """
    notes: list[Note] = field(default_factory=list[Note])
    """Texts of the reward, such as verdicts of a judge, for the sample files."""
    log: str = ""
    """End of an agent's output, for the sample files. Stored in an episode's first sample."""
    advantage: Floats | None = None
    """[L] float32, advantage of each token, computed by the algorithm once per step."""
    columns: dict[Column, Floats] = field(default_factory=dict)
    """[L] or [L, K] float32 each: quantities that the algorithm requires from the trainer, or that it added."""
    excluded: Mask | None = None
    """[L] bool, True for chosen tokens that the algorithm does not train on."""
    episode: int | None = None
    """Number of the episode in the group. Samples with the same number are branches of one episode: they share the
    reward, and no sampled token is trained on twice. None: the sample is a whole episode."""
    turns: Spans = ()
    """Token spans [begin, end) of the policy's turns in this sample, in order; together they cover the sampled tokens.
    Empty: each run of sampled tokens is a turn."""
    turn_rewards: tuple[float, ...] = ()
    """Share of `reward` that each turn earned; the last turn earned the remainder. Empty: the last turn earned all."""
    turn_numbers: tuple[int, ...] = ()
    """Chronological number of each turn in the episode. Empty: the episode's samples followed one another."""
    player: int = 0
    """Side played by the policy, in a game where it plays several; see core.types.episodes.split_players."""
    images: tuple[PlacedImage, ...] = ()
    """Images that the tokens represent, in token order."""
    kept: KeptSets | None = None
    """[L] sets of ids that truncated sampling (top-p, top-k, min-p) left to choose from, empty outside action_mask;
    None: no truncation."""
    routes: Routes | None = None
    """[L, layers, k] experts of each token as an input of the engine; None if it did not record them."""

    def __post_init__(self) -> None:
        n, floats = len(self.token_ids), self.float_dtype
        # At every creation, `replace` included: a wrong array fails where it is made, and not in a loss.
        check_column("token_ids", self.token_ids, INTS, n)
        check_column("action_mask", self.action_mask, BOOLS, n)
        check_column("rollout_logp", self.rollout_logp, floats, n)
        check_column("versions", self.versions, INTS, n)
        self._check_later_fields()
        if self.images:
            check_places(self.images, n)
        if self.kept is not None:
            self.kept.check(self.action_mask)
        if self.routes is not None:
            check_routes(self.routes, n)
        if self.origin == "demonstration" and (self.rollout_logp.any() or (self.versions != -1).any()):
            raise UserError(
                "no policy sampled a demonstration: its rollout_logp must be 0 and its versions -1 at all tokens; a "
                'sample of another policy has origin="other"'
            )

    def _check_later_fields(self) -> None:
        """Check the fields that a step adds to a sample, and clean the text of a failure."""
        # It may quote the policy or user code, and goes to files, trackers and terminals.
        object.__setattr__(self, "failure", escape_controls(self.failure, keep=""))
        n, floats = len(self.token_ids), self.float_dtype
        for name, column in self.columns.items():
            check_column(name, column, floats, n, several=name not in list_fields(Tokens))
        if self.advantage is not None:
            check_column("advantage", self.advantage, floats, n)
        if self.excluded is not None:
            check_column("excluded", self.excluded, BOOLS, n)
        if self.turns or self.turn_rewards or self.turn_numbers:
            check_turns(self.spans, self.turn_rewards, self.turn_numbers, self.action_mask)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return all(is_equal(getattr(self, name), getattr(other, name)) for name in list_fields(Sample))

    def __reduce__(self) -> Any:
        return _restore, (pack_arrays([getattr(self, name) for name in TOKEN_COLUMNS]), _get_others(self))

    @property
    def float_dtype(self) -> np.dtype[Any]:
        """Dtype of all floats of the sample."""
        # A list has no dtype; `check_column` then raises the error that names the field.
        return DOUBLE if getattr(self.rollout_logp, "dtype", SINGLE) == DOUBLE else SINGLE

    @property
    def loss_mask(self) -> Mask:
        """[L] bool, True for trained tokens; never the first token, nor any token of a failed sample. Read-only."""
        mask = self.action_mask
        if not self.failure and self.excluded is None and not (len(mask) and mask[0]):
            return mask  # without a copy, since a step asks for it several times
        # Without a reward there is no advantage to train on.
        chosen = np.zeros_like(mask) if self.failure else mask.copy()
        # A logit predicts the next token, so the first token of a sequence has no prediction.
        chosen[:1] = False
        if self.excluded is not None:
            chosen &= ~self.excluded
        chosen.setflags(write=False)
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
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    def with_advantage(self, advantage: float | Floats) -> Sample:
        """Return the sample with an advantage: a number for all tokens, or an array [L]."""
        each = np.empty(len(self.token_ids), dtype=self.float_dtype)
        # Copied into an array of its own, because the caller's array may still change.
        each[:] = advantage
        return self.replace(advantage=each)

    def replace(self, **changes: Any) -> Sample:
        """Return the sample with some fields changed, like dataclasses.replace.

        A step changes each sample several times, so tokens that stay as they are are not checked again.
        """
        if not changes.keys() <= LATER_FIELDS:
            return replace(self, **changes)
        changed = _fill(_ALL, _get_all(self))
        for name, value in changes.items():
            _PUT[name](changed, value)
        changed._check_later_fields()
        return changed


_ALL = list_fields(Sample)
_OTHERS = tuple(name for name in _ALL if name not in TOKEN_COLUMNS)
_PACKED = (*TOKEN_COLUMNS, *_OTHERS)
_get_all, _get_others = attrgetter(*_ALL), attrgetter(*_OTHERS)
# the setter of each slot, which takes half the time of object.__setattr__
_PUT: dict[str, Callable[[Sample, Any], None]] = {name: getattr(Sample, name).__set__ for name in _ALL}


def _fill(names: Sequence[str], values: Sequence[Any]) -> Sample:
    """Return a sample with these fields, which are not checked."""
    sample = object.__new__(Sample)
    for name, value in zip(names, values, strict=True):
        _PUT[name](sample, value)
    return sample


def _restore(columns: PackedArrays, others: tuple[Any, ...]) -> Sample:
    """Return the sample of `Sample.__reduce__`, whose arrays were checked when it was made."""
    return _fill(_PACKED, (*unpack_arrays(columns), *others))


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
    """Create a Sample from lists of per-token values. `dtype`: dtype of the floats. `kept` may be a list of lists."""
    if others.get("advantage") is not None:
        others["advantage"] = to_column(others["advantage"], dtype)
    if others.get("excluded") is not None:
        others["excluded"] = to_column(others["excluded"], BOOLS)
    # JSON has only lists, but these fields are tuples.
    if "turns" in others:
        others["turns"] = tuple((begin, end) for begin, end in others["turns"])
    for name in others.keys() & {"turn_rewards", "turn_numbers", "images"}:
        others[name] = tuple(others[name])
    if isinstance(others.get("kept"), list):
        others["kept"] = KeptSets.of_lists(others["kept"])
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
"""Samples of one prompt, over which group-relative baselines are computed."""
