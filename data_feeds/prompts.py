"""Which prompt a ticket draws: an endless, seeded shuffle without a state."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache

from core.errors import UserError
from core.types import Prompt
from data_feeds.rows import read_prompts
from data_feeds.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class PromptFeed:
    """Ticket t draws row perm_p[t mod n] in pass p = t div n: every row once per pass, in an order of its own.

    A function of the ticket alone: nothing to save, and nothing to restore.
    """

    prompts: list[Prompt]
    seed: int
    dropped: int = 0
    """Rows left out because they were too long."""
    example: str = field(default="", repr=False)
    """The id of one of them."""

    def draw(self, ticket: int) -> Prompt:
        n = len(self.prompts)
        return self.prompts[_order(self.seed, ticket // n, n)[ticket % n]]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, n: int) -> list[int]:
    order = list(range(n))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def load_prompts(
    path: str, tokenizer: ChatTokenizer, *, key: str, max_prompt_tokens: int, seed: int, limit: int | None = None
) -> PromptFeed:
    """Read prompts, and leave out those of more than `max_prompt_tokens` tokens."""
    rows = read_prompts(path, key=key)
    if answered := [p.id for p in rows if p.messages[-1]["role"] == "assistant"]:
        raise UserError(
            f"{key}={path}: row {answered[0]} ends with an assistant turn, so its answer would stand in the prompt: "
            "leave that turn out (the policy is to say it)"
        )
    lengths = [len(tokenizer.render(p.messages)) for p in rows]
    fitting = [p for p, n in zip(rows, lengths, strict=True) if n <= max_prompt_tokens]
    if not fitting:
        raise UserError(
            f"{key}={path}: every prompt is longer than data.max_prompt_tokens={max_prompt_tokens} "
            f"(the shortest has {min(lengths)} tokens): raise it"
        )
    too_long = [p.id for p, n in zip(rows, lengths, strict=True) if n > max_prompt_tokens]
    return PromptFeed(
        prompts=fitting[:limit], seed=seed, dropped=len(too_long), example=too_long[0] if too_long else ""
    )
