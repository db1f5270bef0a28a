"""Transcript of a player's part of an episode: append-only tokens, and messages."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np

from core.errors import RunStopped
from core.types.drafts import NO_DRAFTS, Drafts
from core.types.images import EncodedImage, MaySee, PlacedImage
from core.types.kept_sets import KeptSets
from core.types.messages import Message, ToolSpec, find_images
from core.types.routes import ROUTE_DTYPES, Routes, extend, fill_unknown
from core.types.samples import LOGP_ROUNDING, Prompt, Sample, Stop
from rollouts.engines.base import Completion, CompletionStop

LARGEST_ID = 2**31 - 1
"""Largest token id that fits a Sample (int32)."""
STOPS = get_args(CompletionStop)


class PlacesImages(MaySee, Protocol):
    """Tokenizer method for `find_places`."""

    def place(self, ids: list[int], images: Sequence[EncodedImage], begin: int = 0) -> tuple[PlacedImage, ...]: ...


class Tokenizer(PlacesImages, Protocol):
    """Tokenizer methods for an episode; see data_feeds/chat/tokenizer.py."""

    def render(self, messages: list[Message], tools: Sequence[ToolSpec] = ()) -> list[int]: ...
    def render_turns(self, reply: Message, answers: list[Message], tools: Sequence[ToolSpec] = ()) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def bound_tokens(self, messages: list[Message], *, limit: int, tools: Sequence[ToolSpec] = ()) -> int | None: ...


def find_places(
    tokenizer: PlacesImages, ids: list[int], messages: Sequence[Message], begin: int = 0
) -> tuple[PlacedImage, ...]:
    """Return the images of messages with their token spans in `ids`, from `begin` on.

    Vision models are checked even without images, since text could contain a placeholder token.
    """
    images = find_images(messages)
    if not images and tokenizer.images is None:
        return ()
    return tokenizer.place(ids, images, begin=begin)


class SharedPrompt:
    """Tokenizer of one group: the prompt that its episodes begin with is rendered once."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.images = tokenizer, tokenizer.images
        self.render_turns, self.decode = tokenizer.render_turns, tokenizer.decode
        self.bound_tokens = tokenizer.bound_tokens
        self._last: tuple[list[Message], Sequence[ToolSpec]] | None = None
        self._ids: list[int] = []

    def render(self, messages: list[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the ids of a conversation with the header of the next reply. Callers do not change the list."""
        # compared by value: an environment may add messages to the prompt, or tools
        if self._last != (messages, tools):
            self._ids = self.tokenizer.render(messages, tools)
            # a copy: an environment may change the messages of its prompt
            self._last = copy.deepcopy((messages, tools))
        return self._ids

    def place(self, ids: list[int], images: Sequence[EncodedImage], begin: int = 0) -> tuple[PlacedImage, ...]:
        return self.tokenizer.place(ids, images, begin)


@dataclass(kw_only=True)
class Conversation:
    """Token columns of a conversation, append-only. All columns have the same length."""

    ids: list[int] = field(default_factory=list[int])
    action_mask: list[bool] = field(default_factory=list[bool])
    logp: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    kept: list[tuple[int, KeptSets]] = field(default_factory=list[tuple[int, KeptSets]])
    """Kept sets of every reply, with the place of its first token. Empty without truncation."""
    routes: Routes | None = None
    """Experts of the tokens up to the last reply's end; None if the engine does not record them."""
    turns: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Token range [begin, end) of every reply to train on."""
    messages: list[Message] = field(default_factory=list[Message])
    stop: Stop = "eos"
    images: tuple[PlacedImage, ...] = ()
    drafts: Drafts = NO_DRAFTS
    """Counts of speculative decoding, of all replies."""

    def append_context(self, ids: list[int]) -> None:
        """Append tokens that are not trained on."""
        # 0 and -1 are placeholders: the action mask excludes these tokens
        self._append(ids, [0.0] * len(ids), [-1] * len(ids), sampled=False)

    def append_reply(self, done: Completion) -> None:
        """Append a turn of sampled tokens, which are trained on."""
        begin = len(self.ids)
        self._append(done.token_ids, done.logp, done.versions, sampled=True)
        self.turns.append((begin, len(self.ids)))
        if done.kept is not None:
            self.kept.append((begin, done.kept))
        if done.routes is not None:
            self.routes = fill_unknown(self.routes, done.routes)
        self.drafts = self.drafts.add(done.drafts)

    @property
    def completion_ids(self) -> list[int]:
        """Tokens from the first sampled token on, including later context."""
        return self.ids[self.turns[0][0] :] if self.turns else []

    def make_sample(self, prompt: Prompt, *, counts: dict[str, float] | None = None, **others: Any) -> Sample:
        """Return the sample. counts: those of the episode. others: fields besides columns, stop and images."""
        return Sample(
            prompt=prompt,
            token_ids=np.array(self.ids, dtype=np.int32),
            action_mask=np.array(self.action_mask, dtype=np.bool_),
            rollout_logp=np.array(self.logp, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            stop=self.stop,
            images=self.images,
            counts=(counts or {}) | self.drafts.to_counts(),
            kept=self._join_kept() if self.kept else None,
            routes=None if self.routes is None else extend(self.routes, len(self.ids)),
            **others,
        )

    def _join_kept(self) -> KeptSets:
        """Return the sets of all tokens; those of the context are empty."""
        parts: list[KeptSets] = []
        end = 0
        for begin, sets in self.kept:
            parts += [KeptSets.none(begin - end), sets]
            end = begin + len(sets)
        return KeptSets.join([*parts, KeptSets.none(len(self.ids) - end)])

    def _append(self, ids: list[int], logp: list[float], versions: list[int], *, sampled: bool) -> None:
        self.ids = self.ids + ids  # a new list: the engine may still hold the old one
        self.action_mask += [sampled] * len(ids)
        self.logp += logp
        self.versions += versions


@dataclass(kw_only=True)
class Transcript(Conversation):
    """Episode so far, as one player sees it. `messages` are those after the prompt."""

    prompt: Prompt
    """Messages and tools shown to the player."""
    tokens_left: int
    """Remaining token budget after the prompt."""
    last_ids: list[int] = field(default_factory=list[int])
    """Tokens of the last reply."""
    last_text: str = ""
    """Text of the last reply."""

    def copy(self) -> Transcript:
        """Return a transcript that can grow by itself."""
        own = copy.copy(self)
        own.action_mask, own.logp, own.versions = [*self.action_mask], [*self.logp], [*self.versions]
        own.kept, own.turns, own.messages = [*self.kept], [*self.turns], [*self.messages]
        return own

    def append_given(self, tokenizer: Tokenizer, ids: list[int], messages: Sequence[Message]) -> None:
        """Append messages shown to the player, given their tokens."""
        begin = len(self.ids)
        self.append_context(ids)
        self.images += find_places(tokenizer, self.ids, messages, begin)

    def may_fit(self, tokenizer: Tokenizer, given: Sequence[Message]) -> bool:
        """Tell whether new messages may fit the budget; otherwise set `stop`. Encodes no megabytes of them.

        To encode all that a tool may return would stop the other episodes of the process.
        """
        seen, limit = [*self.prompt.messages, *self.messages, *given], len(self.ids) + self.tokens_left
        if tokenizer.bound_tokens(seen, limit=limit, tools=self.prompt.tools) is None:
            return True
        self.stop = "length"
        return False

    def spend(self, n_tokens: int) -> bool:
        """Subtract tokens from the budget. Return False, and set `stop`, if none are left."""
        self.tokens_left -= n_tokens
        if self.tokens_left <= 0:
            self.stop = "length"
        return self.tokens_left > 0

    def append_sampled(self, done: Completion) -> None:
        self.append_reply(done)
        self.last_ids = done.token_ids
        self.tokens_left -= len(done.token_ids)

    @property
    def is_one_text(self) -> bool:
        """True if the player wrote one plain reply, so that the decoded tokens show all of it."""
        return not self.messages or (len(self.messages) == 1 and {*self.messages[0]} == {"role", "content"})

    def make_player_sample(
        self, tokenizer: Tokenizer, player: int, parts: dict[str, float], counts: dict[str, float], failure: str
    ) -> Sample:
        """Return the player's sample, with the environment's scores, or the reason of failure."""
        completion = self.completion_ids
        return self.make_sample(
            self.prompt,
            reward_parts=parts,
            failure=failure,
            completion=self.last_text if completion == self.last_ids else tokenizer.decode(completion),
            # one reply spans the whole completion, which the action mask shows already
            turns=tuple(self.turns) if len(self.turns) > 1 else (),
            transcript=[] if self.is_one_text else self.messages,
            counts=counts,
            player=player,
        )


def check_completion(
    done: Completion, *, max_new_tokens: int, is_truncated: bool = False, routed: int | None = None
) -> None:
    """Raise RunStopped for an invalid completion, which would silently corrupt training.

    is_truncated: whether the engine must report kept sets. routed: length of the prefix if it must report routes.
    """
    n = len(done.token_ids)
    wrong = None
    if {len(done.logp), len(done.versions)} != {n}:
        wrong = f"{n} tokens with {len(done.logp)} log-probabilities and {len(done.versions)} versions"
    # an empty reply would have no token to train on
    elif not 1 <= n <= max_new_tokens:
        wrong = f"{n} tokens where 1 to {max_new_tokens} were asked for"
    elif not all(map(math.isfinite, done.logp)) or max(done.logp) > LOGP_ROUNDING:
        bad = next(logp for logp in done.logp if not math.isfinite(logp) or logp > LOGP_ROUNDING)
        wrong = f"the log-probability {bad}, where a finite number up to 0 is possible"
    elif {*map(type, done.token_ids)} != {int} or not 0 <= min(done.token_ids) <= max(done.token_ids) <= LARGEST_ID:
        wrong = f"the token ids {done.token_ids[:8]}, where integers from 0 to {LARGEST_ID} are possible"
    elif done.stop not in STOPS:
        wrong = f"the stop reason {done.stop!r}, where {' or '.join(STOPS)} is possible"
    elif is_truncated or done.kept is not None:
        wrong = _find_wrong_set(done, is_truncated=is_truncated)
    if wrong is None and routed is not None:
        wrong = _find_wrong_routes(done, routed + n)
    if wrong:
        raise RunStopped(f"the engine (rollout.engine) returned {wrong}: correct its generate()")


def _find_wrong_set(done: Completion, *, is_truncated: bool) -> str | None:
    """Return the first mistake in the kept sets of a completion, or None."""
    if done.kept is None:
        return "no kept sets, and rollout.top_p, top_k or min_p is set"
    if not is_truncated:
        return "kept sets, and none of rollout.top_p, top_k and min_p is set"
    if len(done.kept) != len(done.token_ids):
        return f"{len(done.token_ids)} tokens with {len(done.kept)} kept sets"
    outside = np.flatnonzero(~done.kept.contain(np.array(done.token_ids)))
    return f"the token {done.token_ids[outside[0]]}, which is not in its own kept set" if len(outside) else None


def _find_wrong_routes(done: Completion, length: int) -> str | None:
    """Return the flaw of a completion's routes, as a clause, or None. length: tokens of prefix and completion."""
    if done.routes is None:
        return "no routes, and rollout.router_replay is set"
    if done.routes.ndim == 3 and len(done.routes) == length and done.routes.dtype in ROUTE_DTYPES:
        return None
    return f"routes {list(done.routes.shape)} in {done.routes.dtype} for {length} tokens of prompt and reply"
