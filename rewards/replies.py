"""Reasoning of a reply, which no reward reads as its answer."""

from __future__ import annotations

import re

OPENED = re.compile(r"<think(?:ing)?>|\[THINK\]")
CLOSED = re.compile(r"\A.*(?:</think(?:ing)?>|\[/THINK\])", re.DOTALL)
"""All text up to the last end of a reasoning."""


def cut_reasoning(reply: str) -> str:
    """Return a reply without its reasoning: the text after the last "</think>", without a "<think>" that stays open.

    >>> cut_reasoning("<think>#### 3</think>#### 4"), cut_reasoning("3<think>or 4"), cut_reasoning("#### 5")
    ('#### 4', '3', '#### 5')
    """
    # a chat template may have opened the reasoning, so its end counts without a beginning
    return OPENED.split(CLOSED.sub("", reply), maxsplit=1)[0]
