"""Rubric as a reward: a judge checks each criterion of the row. See docs/how_to/judge.md.

    reward: {function: rubric, weights: {score: 1.0}, timeout_s: 240, settings: {base_url: ..., model: ...}}

    score     points of the criteria that are met, divided by the positive points. It is not clipped: negative
              points may lower it below 0

The row's column `rubric` is a list of objects, or its JSON, with a text (criterion or description) and points (points
or weight). A criterion has a call of its own. If one has no readable verdict, the sample fails. An empty reply gets the
lowest score without a call. The settings are those of `judge`; a verdict is from 0 (not met) to 1 (met).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import Field

from core.errors import UserError
from rewards import Failed, RewardRun, Scored
from rewards.judge import check_settings
from rewards.judging.judge import Judge, Verdict
from rewards.judging.prompts import FOLDER, show_reply
from rewards.judging.settings import JudgeSettings, VerdictFormat, read_settings, read_template
from rewards.rubric_rows import add_up, read_rubric

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt

PROMPT = FOLDER / "rubric.txt"


class RubricSettings(JudgeSettings):
    """Settings of a rubric's judge."""

    verdict: VerdictFormat = "letter"
    scale: tuple[float, float] = (0.0, 1.0)
    labels: dict[str, float] = Field({"yes": 1.0, "no": 0.0})


async def score(prompt: Prompt, messages: list[Message], *, run: RewardRun, **settings: Any) -> Scored:
    """Ask the judge about each criterion. Raises ValueError for a row without a rubric."""
    items = read_rubric(prompt.id, prompt.extra)
    judge = make_judge(json.dumps(settings), run)
    reply = show_reply(messages, judge.settings)
    if not reply:
        return Scored({"score": add_up(items, [float(item.points < 0) for item in items])})
    asked = await asyncio.gather(
        *(judge.ask(prompt, reply, criteria=item.criterion) for item in items), return_exceptions=True
    )
    # also those of criteria that failed
    answers = [one for one in asked if isinstance(one, Verdict | Failed)]
    notes = [note for one in answers for note in one.notes]
    counts: Counter[str] = Counter()
    for one in answers:
        counts.update(one.counts)
    for item, one in zip(items, asked, strict=True):
        if isinstance(one, Failed):
            raise Failed(f"criterion {item.criterion!r:.80}: {one}", notes=notes, counts=counts)
        if isinstance(one, BaseException):
            raise one
    met = [one.value for one in asked if isinstance(one, Verdict)]
    return Scored({"score": add_up(items, met)}, notes=notes, counts=dict(counts))


def check(deadline_s: float, *, run: RewardRun, **settings: Any) -> None:
    """Raise UserError for an invalid setting, prompt or key. deadline_s: reward.timeout_s."""
    check_settings(read_settings(RubricSettings, settings), deadline_s, run.judge)
    prepare(run=run, **settings)


def prepare(*, run: RewardRun, **settings: Any) -> None:
    """Check settings, prompt and key in every process."""
    make_judge(json.dumps(settings), run)


@lru_cache(maxsize=8)
def make_judge(settings: str, run: RewardRun) -> Judge:
    """Return the judge of these settings, given as JSON."""
    given = read_settings(RubricSettings, json.loads(settings))
    if given.anchors is not None:
        raise UserError("reward.settings.anchors are of the reward judge, and this is rubric: leave it out")
    low, high = given.bounds
    if low < 0 or high > 1:
        raise UserError("reward.settings: a criterion is met or not: scale and labels must be from 0 to 1")
    return Judge(given, read_template(given, PROMPT), run)
