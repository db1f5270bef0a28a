"""Tokens that a run may sample: `rollout.allowed_tokens`, without image placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.errors import UserError, quote
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.images import MaySee


class TokenEncoder(MaySee, Protocol):
    """Tokenizer methods to resolve allowed tokens; see data_feeds/chat/tokenizer.py."""

    @property
    def stop_token_ids(self) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...


def resolve_allowed_tokens(
    tokenizer: TokenEncoder, allowed: Sequence[str], stop_token_ids: Sequence[int]
) -> AllowedTokens:
    """Return the allowed tokens: `rollout.allowed_tokens`, or all tokens except image placeholders.

    stop_token_ids: tokens that end a reply. They are always allowed. Raises UserError for a text that is not one token.
    """
    banned: frozenset[int] = frozenset() if tokenizer.images is None else tokenizer.images.placeholder_ids
    if not allowed:
        return AllowedTokens(banned=tuple(sorted(banned))) if banned else EVERY_TOKEN
    texts: dict[int, str] = {}
    for text in allowed:
        ids = tokenizer.encode(text)
        if len(ids) != 1:
            raise UserError(
                f"rollout.allowed_tokens names {quote(text)}, which is {len(ids)} tokens of the model's tokenizer: "
                "name single tokens, or add this text to the tokenizer as a token"
            )
        [token] = ids
        if token in texts:
            raise UserError(
                f"rollout.allowed_tokens names {quote(text)} and {quote(texts[token])}, which are one token: leave one "
                "of them out"
            )
        if token in banned:
            raise UserError(
                f"rollout.allowed_tokens names {quote(text)}, which stands for an image and is never sampled: leave "
                "it out"
            )
        if token in stop_token_ids:
            raise UserError(
                f"rollout.allowed_tokens names {quote(text)}, which ends a reply and is always allowed: leave it out"
            )
        texts[token] = text
    # with the stop tokens, or no reply could end
    # sorted: AllowedTokens.to_columns is a binary search
    return AllowedTokens(allowed=tuple(sorted({*texts, *stop_token_ids})))
