"""Conversations to learn from: rows whose messages hold at least one assistant turn -> Samples."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import UserError
from core.types import Group, Prompt, Sample
from data_feeds.prompts import PromptFeed
from data_feeds.rows import read_prompts
from data_feeds.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class ChatFeed:
    """Step s takes the rows of tickets s x rows_per_step and on; the order is PromptFeed's."""

    rows: PromptFeed
    samples: dict[str, Sample]
    """By row id."""
    no_reply: int
    """Rows left out because no assistant says anything in them."""

    def batch(self, step: int, rows_per_step: int) -> list[Group]:
        tickets = range(step * rows_per_step, (step + 1) * rows_per_step)
        return [[self.samples[self.rows.draw(t).id]] for t in tickets]

    def all(self) -> list[Group]:
        return [[s] for s in self.samples.values()]


def load_chats(
    path: str, tokenizer: ChatTokenizer, *, key: str, max_tokens: int, seed: int, limit: int | None = None
) -> ChatFeed:
    """Read conversations; those without a reply or of more than `max_tokens` tokens are left out and counted."""
    samples: dict[str, Sample] = {}
    kept: list[Prompt] = []
    too_long: list[str] = []
    no_reply = 0
    for row in read_prompts(path, key=key):
        ids, mask = tokenizer.learnt_turns(row.messages)
        if not any(mask[1:]):
            no_reply += 1
        elif len(ids) > max_tokens:
            too_long.append(row.id)
        else:
            nothing = [0.0] * len(ids)
            samples[row.id] = Sample(
                prompt=row, token_ids=ids, mask=mask, rollout_logp=nothing, versions=[-1] * len(ids)
            )
            kept.append(row)
            if limit is not None and len(kept) == limit:
                break
    if not kept:
        raise UserError(
            f"{key}={path}: no row can be learnt from: {no_reply} have no assistant turn, {len(too_long)} more than "
            f"data.max_prompt_tokens={max_tokens} tokens"
        )
    feed = PromptFeed(prompts=kept, seed=seed, dropped=len(too_long), example=too_long[0] if too_long else "")
    return ChatFeed(rows=feed, samples=samples, no_reply=no_reply)
