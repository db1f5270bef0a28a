"""Tokenizer with a token per character, for tests of what reads and writes tokens."""

from __future__ import annotations

from typing import Any


class Characters:
    """Tokenizer whose ids are code points. `rendered` has the messages and tools of each call."""

    stop_token_ids = (10, 13)

    def __init__(self) -> None:
        self.rendered: list[Any] = []

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def render(self, messages: list[Any], tools: list[Any]) -> list[int]:
        self.rendered.append((messages, tools))
        return self.encode("".join(message["content"] for message in messages))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))
