"""Judge: a prompt and a reply in, a checked verdict out, with votes, retries, notes and counts.

A verdict that cannot be read, was cut off or is missing fails the sample. It is never a low value: that would train on
outages.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.types.notes import Note
from rewards import RewardRun
from rewards.judging.anchors import Anchors, read_anchors
from rewards.judging.cache import Answer, VerdictCache, hash_request
from rewards.judging.client import JudgeClient, find_server
from rewards.judging.prompts import ask_for_verdict, enclose, fill_template, hash_text, show_question
from rewards.judging.readings import Unreadable, find_choice, read_text, read_verdict
from rewards.judging.settings import JudgeSettings
from rewards.scored import Failed

if TYPE_CHECKING:
    from core.types.samples import Prompt

RETRY_TEMPERATURE = 0.7
"""Least temperature of the request after an unreadable verdict: at 0 it would be the same."""
TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Value that a judge states, with notes and counts."""

    value: float
    notes: list[Note] = field(default_factory=list[Note])
    counts: dict[str, float] = field(default_factory=dict[str, float])


class Judge:
    """Client, cache and template of a judge in a reward process."""

    def __init__(self, settings: JudgeSettings, template: str, run: RewardRun) -> None:
        """template: prompt with places. Raises UserError if the key is not set."""
        server, own = find_server(settings, run.judge), run.judge if settings.base_url is None else None
        self._attempts = 1 + settings.parse_retries
        if own is not None:
            # its temperature is of the engine, and a greedy one would repeat an unreadable verdict
            settings = settings.model_copy(
                update={"model": own.model, "temperature": None, "words": own.words or settings.words}
            )
            self._attempts = 1 if own.is_greedy else self._attempts
        self.settings, self.template = settings, template
        self._client = JudgeClient(settings, max(1, settings.max_concurrency // run.engines), server)
        folder, earlier = run.folder, run.earlier_folder
        # the policy's verdict of an earlier step is not that of its present weights
        self._shares = own is None or own.is_frozen
        is_kept = settings.cache and folder is not None and self._shares
        self.anchors = Anchors(
            read_anchors(settings.anchors, settings.bounds),
            settings.anchors_every,
            settings.bounds[1] - settings.bounds[0],
        )
        self._cache = VerdictCache(
            Path(folder) if is_kept and folder else None, Path(earlier) if is_kept and earlier else None
        )

    async def ask(self, prompt: Prompt, reply: str, *, criteria: str = "", is_fresh: bool = False) -> Verdict:
        """Return the verdict on a reply, which is not empty. Raises Failed with the notes and counts of the calls.

        is_fresh: whether to ask although the cache has the verdict.
        """
        key = hash_text(reply)
        content = fill_template(
            self.template,
            {
                "question": show_question(prompt.messages) if "{question}" in self.template else "",
                "reply": enclose(reply, key),
                "answer": prompt.answer,
                "criteria": criteria,
                "verdict": ask_for_verdict(self.settings, key),
            },
        )
        notes: list[Note] = []
        counts: Counter[str] = Counter()
        votes = await asyncio.gather(
            *(self._vote(vote, content, key, notes, counts, is_fresh=is_fresh) for vote in range(self.settings.votes))
        )
        values = [vote for vote in votes if isinstance(vote, float)]
        if 2 * len(values) <= len(votes):
            why = next(vote for vote in votes if isinstance(vote, str))
            raise Failed(why, notes=notes, counts=counts)
        if len(votes) > 1:
            counts["judge/votes"] += len(values)
            counts["judge/agreed"] += Counter(values).most_common(1)[0][1]
        return Verdict(value=join_votes(values, self.settings), notes=notes, counts=dict(counts))

    async def _vote(
        self, vote: int, content: str, key: str, notes: list[Note], counts: Counter[str], *, is_fresh: bool
    ) -> float | str:
        """Return the value of one vote, or the reason why there is none."""
        why = ""
        for attempt in range(self._attempts):
            body = make_body(self.settings, content, vote=vote, attempt=attempt)
            try:
                answer, is_cached = await self._get(body, key, is_fresh=is_fresh)
            except Failed as error:
                counts["judge/unanswered"] += 1
                return str(error)
            _count(counts, answer, is_cached=is_cached)
            seconds = 0.0 if is_cached else answer["seconds"]
            notes.append(
                Note(
                    by=self.settings.model or "",
                    text=answer["text"] or answer["why"],
                    reading=answer["value"],
                    seconds=seconds,
                    cached=is_cached,
                )
            )
            if answer["value"] is not None:
                return answer["value"]
            why = f"the judge's verdict cannot be read: {answer['why']}"
        return why

    async def _get(self, body: dict[str, Any], key: str, *, is_fresh: bool) -> tuple[Answer, bool]:
        """Return the answer to a request, and whether it cost no call."""
        if is_fresh or not self._shares:
            return await self._call(body, key), False
        request = hash_request(self._client.server.name, body, describe_reading(self.settings))
        return await self._cache.get(request, lambda: self._call(body, key))

    async def _call(self, body: dict[str, Any], key: str) -> Answer:
        clock = asyncio.get_running_loop()
        start = clock.time()
        found, retries = await self._client.ask(body)
        usage = found.get("usage")
        answer: Answer = {
            "text": "",
            "value": None,
            "why": "",
            "seconds": round(clock.time() - start, 4),
            "retries": retries,
            "tokens_in": _read_tokens(usage, "prompt_tokens"),
            "tokens_out": _read_tokens(usage, "completion_tokens"),
        }
        choice = find_choice(found)
        if choice is None:
            answer["why"] = "the server's answer has no choices"
            # an error of a gateway used no tokens
            answer["tokens_in"], answer["tokens_out"] = answer["tokens_in"] or 0, answer["tokens_out"] or 0
            return answer
        answer["text"] = self._client.clean(read_text(choice))
        try:
            answer["value"] = read_verdict(choice, self.settings, key)
        except Unreadable as error:
            answer["why"] = self._client.clean(str(error))
        return answer


def _count(counts: Counter[str], answer: Answer, *, is_cached: bool) -> None:
    if is_cached:
        counts["judge/cached"] += 1
        return
    counts["judge/calls"] += 1
    counts["judge/unreadable"] += answer["value"] is None
    counts["judge/retries"] += answer["retries"]
    tokens_in, tokens_out = answer["tokens_in"], answer["tokens_out"]
    if tokens_in is None or tokens_out is None:
        counts["judge/without_usage"] += 1
        return
    counts["judge/tokens_in"] += tokens_in
    counts["judge/tokens_out"] += tokens_out


def _read_tokens(usage: Any, name: str) -> int | None:
    """Return a number of tokens as the server counts them; None if it does not say."""
    found = usage.get(name) if isinstance(usage, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return found if isinstance(found, int) else None


def make_body(settings: JudgeSettings, content: str, *, vote: int, attempt: int) -> dict[str, Any]:
    """Return the body of a request. The seed is of vote and attempt alone, so equal replies have equal requests."""
    digest = hashlib.blake2b(f"{settings.seed}/{vote}/{attempt}".encode(), digest_size=4).digest()
    body: dict[str, Any] = {
        "model": settings.model,
        "messages": [{"role": "user", "content": content}],
        "seed": int.from_bytes(digest, "big") >> 1,
    }
    if settings.temperature is not None:
        body["temperature"] = max(settings.temperature, RETRY_TEMPERATURE if attempt else 0.0)
    if settings.max_tokens is not None:
        body["max_tokens"] = settings.max_tokens
    if settings.verdict == "probability":
        # the first word is the verdict, and its probability is that of the judge at temperature 1
        body |= {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
    return body | settings.extra


def describe_reading(settings: JudgeSettings) -> dict[str, Any]:
    """Return the settings by which a text becomes a value."""
    return settings.model_dump(include={"verdict", "scale", "labels"})


def join_votes(values: Sequence[float], settings: JudgeSettings) -> float:
    """Return the mean of the votes; of labels, the most frequent value, and of a tie the mean of the tied ones."""
    if settings.verdict != "letter":
        return sum(values) / len(values)
    counted = Counter(values).most_common()
    tied = [value for value, n in counted if n == counted[0][1]]
    return sum(tied) / len(tied)
