"""Anchors: replies with known values, which the judge grades again and again. They show a judge that has changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from core.errors import UserError, quote
from core.numbers import is_finite
from core.text.json_text import decode_json
from core.text.text_files import read_text
from rewards.scored import Failed


class Graded(Protocol):
    """Verdict of a judge."""

    @property
    def value(self) -> float: ...
    @property
    def counts(self) -> Mapping[str, float]: ...


class Grader(Protocol):
    """Judge that grades a reply; see judge.py."""

    async def ask(self, prompt: Any, reply: str, *, is_fresh: bool) -> Graded: ...


@dataclass(frozen=True, slots=True)
class Anchor:
    """Reply with a known value."""

    prompt: Any
    """Prompt of the reply, as a reward gets it."""
    reply: str
    score: float


class Anchors:
    """Anchors of a judge, due at the first verdict of a process and after every `every` more."""

    def __init__(self, anchors: list[Anchor], every: int, width: float) -> None:
        """width: of the judge's scale, by which errors are divided."""
        self._anchors, self._every, self._width = anchors, every, width
        self._verdicts = 0

    async def measure(self, judge: Grader) -> dict[str, float]:
        """Count a verdict. If anchors are due, grade them without the cache; return counts of calls and errors."""
        is_due = self._anchors and self._verdicts % self._every == 0
        self._verdicts += 1
        if not is_due:
            return {}
        asked = (judge.ask(anchor.prompt, anchor.reply, is_fresh=True) for anchor in self._anchors)
        # a failed one says nothing of the judge's taste, and the other anchors do
        found = await asyncio.gather(*asked, return_exceptions=True)
        counts: Counter[str] = Counter()
        for anchor, verdict in zip(self._anchors, found, strict=True):
            if isinstance(verdict, BaseException) and not isinstance(verdict, Failed):
                raise verdict
            counts.update(verdict.counts)
            if not isinstance(verdict, Failed | BaseException):
                counts["judge/anchors"] += 1
                counts["judge/anchor_errors"] += abs(verdict.value - anchor.score) / self._width
        return dict(counts)


def read_anchors(path: str | None, bounds: tuple[float, float]) -> list[Anchor]:
    """Read a file of JSON lines {prompt, reply, score, answer}; none without a path. Raises UserError."""
    if path is None:
        return []
    key = f"reward.settings.anchors: {quote(path)}"
    lines = read_text(Path(path).expanduser(), key).splitlines()
    found = [_read_anchor(line, f"{key}, line {i}", bounds) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"{key} has no rows: write one, or leave the setting out")
    return found


def _read_anchor(line: str, where: str, bounds: tuple[float, float]) -> Anchor:
    try:
        row = decode_json(line)
        prompt, reply, score = row["prompt"], row["reply"], row["score"]
        answer = row.get("answer", "")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is no JSON object with prompt, reply and score: correct it") from error
    low, high = bounds
    if not is_finite(score):
        raise UserError(f"{where}: score must be a number, found {quote(score)}")
    if not low <= score <= high or not all(isinstance(text, str) for text in (prompt, reply, answer)) or not reply:
        raise UserError(f"{where}: prompt and reply must be texts, and score from {low:g} to {high:g}")
    # without torch, as the prompts of a reward process
    return Anchor(SimpleNamespace(messages=[{"role": "user", "content": prompt}], answer=answer), reply, float(score))
