"""Demonstrations, given as text and tokenised as rows of supervised learning; and recorded episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from core.types.images import EncodedImage, PlacedImage
from core.types.messages import Message, ToolSpec, find_images
from core.types.samples import Prompt, RecordedEpisode, Sample, make_sample
from data_feeds.chat.encoding import Encoded, join_encoded
from data_feeds.chat.turns import Piece, TrainOn


class TurnTokenizer(Protocol):
    """Tokenizer methods for a conversation whose turns are trained on; see data_feeds/chat/tokenizer.py."""

    def split_turns(
        self, messages: list[Message], train_on: TrainOn, tools: Sequence[ToolSpec] = ()
    ) -> list[Piece]: ...
    def encode_pieces(self, pieces: list[Piece]) -> list[Encoded]: ...
    def place(self, ids: list[int], images: Sequence[EncodedImage], begin: int = 0) -> tuple[PlacedImage, ...]: ...


def mark_replies(asked: Sequence[Message], answered: Sequence[Message]) -> list[Message]:
    """Return the whole conversation, in which the assistant's turns after the prompt are trained on."""
    given: list[Message] = [{**m, "train": False} for m in asked]
    return [*given, *({**m, "train": m["role"] == "assistant"} for m in answered)]


def make_demonstration(tokenizer: TurnTokenizer, prompt: Prompt) -> Sample:
    """Return the sample of a prompt's demonstration, without a reward."""
    messages = mark_replies(prompt.messages, prompt.demonstration)
    ids, mask = join_encoded(tokenizer.encode_pieces(tokenizer.split_turns(messages, (), prompt.tools)))
    chosen = np.array(mask, dtype=np.bool_)
    places = tokenizer.place(ids, find_images(prompt.messages))
    for place in places:
        chosen[place.begin : place.end] = False
    return Sample(
        prompt=prompt,
        token_ids=np.array(ids, dtype=np.int32),
        action_mask=chosen,
        rollout_logp=np.zeros(len(ids), dtype=np.float32),
        versions=np.full(len(ids), -1, dtype=np.int32),
        origin="demonstration",
        completion="".join(m["content"] for m in prompt.demonstration if m["role"] == "assistant"),
        transcript=[] if len(prompt.demonstration) == 1 else prompt.demonstration,
        images=places,
    )


def make_recorded(tokenizer: TurnTokenizer, prompt: Prompt, recorded: RecordedEpisode) -> Sample:
    """Return the sample of a recorded episode, without a reward: a demonstration if it has no tokens."""
    if not recorded.token_ids:
        shown = make_demonstration(tokenizer, replace(prompt, demonstration=recorded.messages))
        return replace(shown, prompt=prompt)
    return make_sample(
        prompt=prompt,
        token_ids=recorded.token_ids,
        action_mask=[logp is not None for logp in recorded.logp],
        rollout_logp=[logp or 0.0 for logp in recorded.logp],
        # no version of this run sampled it
        versions=[-1] * len(recorded.token_ids),
        origin="other",
        stop=recorded.stop,
        completion=recorded.completion,
        transcript=[] if len(recorded.messages) == 1 else recorded.messages,
    )
