"""The text of each token of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_feeds.chat.decoding import decode_exactly

BROKEN = "\ufffd"
"""Replacement character that a decoder writes for incomplete bytes."""


class PieceDecoder:
    """Decoder of single tokens into pieces that join to the text; each id is decoded once."""

    def __init__(self, tokenizer: Any):
        """tokenizer: of Hugging Face."""
        self.tokenizer = tokenizer
        # a token in front: some decoders drop the space before the first token
        self.anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)[:1]
        # length of the anchor's own text, which is cut off from every decoded text
        self.before = len(self._decode_whole([]))
        self.known: dict[int, str] = {}

    def decode(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; a character of several tokens stands at the last of them."""
        pieces: list[str] = []
        run: list[int] = []  # tokens since the last whole character
        for token in token_ids:
            run.append(token)
            text = self._decode_one(token) if len(run) == 1 else self._decode_after_anchor(run)
            if text.endswith(BROKEN) and len(run) < LONGEST_RUN:
                pieces.append("")
            else:
                pieces.append(text)
                run = []
        # the sequence ends inside a character: its bytes are shown as the decoder writes them
        if run:
            pieces[-1] = self._decode_after_anchor(run)
        return pieces

    def _decode_one(self, token: int) -> str:
        if token not in self.known:
            self.known[token] = self._decode_after_anchor([token])
        return self.known[token]

    def _decode_after_anchor(self, tokens: list[int]) -> str:
        return self._decode_whole(tokens)[self.before :]

    def _decode_whole(self, tokens: list[int]) -> str:
        return decode_exactly(self.tokenizer, [*self.anchor, *tokens], special=True)


LONGEST_RUN = 8
"""Tokens after which bytes that make no character are shown as they are; a character has four bytes at most."""
