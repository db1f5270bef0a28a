"""Chat templates in Python, whose parts a test chooses: what stands before, in and after a turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Writes = Callable[[Any, bool], str]
"""Writes a part of a turn, from its message and whether the turn is the last."""
TOKENS = ("<u>", "<a>", "</a>", "</s>", "<h>")


def write_content(message: Any, is_last: bool) -> str:
    return message["content"]


@dataclass(frozen=True, kw_only=True)
class Template:
    """Template of questions `<u>...` and replies `<a>...</a>`; every part may be another."""

    header: Writes = lambda message, is_last: "<a>"
    content: Writes = write_content
    end: Writes = lambda message, is_last: "</a>"
    opens: str = "<a>"
    """Header of the next reply."""
    question: str = "<u>"
    question_end: str = ""
    first: Callable[[list[Any]], str] = lambda messages: ""
    final: str = ""
    """Text after a conversation to which no reply follows."""

    def __call__(self, messages: list[Any], reply_next: bool) -> str:
        turns = [self.write_turn(message, i == len(messages) - 1) for i, message in enumerate(messages)]
        return self.first(messages) + "".join(turns) + (self.opens if reply_next else self.final)

    def write_turn(self, message: Any, is_last: bool) -> str:
        said = self.content(message, is_last)
        if message["role"] == "assistant":
            return self.header(message, is_last) + said + self.end(message, is_last)
        return ("<o>" if message["role"] == "tool" else self.question) + said + self.question_end
