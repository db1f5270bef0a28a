"""Judge as a reward: a model behind an OpenAI-compatible address grades each reply. See docs/how_to/judge.md.

    reward: {function: judge, weights: {score: 1.0}, timeout_s: 240, settings: {base_url: ..., model: ...}}
    judge: {model: ...}     in place of base_url and model, for a judge that the run serves

    score     the judge's verdict, as a number of `scale` or the value of a label

An empty reply gets the lowest value without a call. A reply without a readable verdict is a failed sample.
rewards/judging/settings.py has the settings.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from rewards import RewardRun, RunJudge, Scored
from rewards.judging.judge import Judge
from rewards.judging.prompts import FOLDER, show_reply
from rewards.judging.settings import JudgeSettings, read_settings, read_template

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt

PROMPT = FOLDER / "judge.txt"


async def score(prompt: Prompt, messages: list[Message], *, run: RewardRun, **settings: Any) -> Scored:
    """Ask the judge for a verdict on the reply."""
    judge = make_judge(json.dumps(settings), run)
    reply = show_reply(messages, judge.settings)
    if not reply:
        return Scored({"score": judge.settings.bounds[0]})
    verdict = await judge.ask(prompt, reply)
    counts = Counter(verdict.counts)
    counts.update(await judge.anchors.measure(judge))
    return Scored({"score": verdict.value}, notes=verdict.notes, counts=dict(counts))


def check(deadline_s: float, *, run: RewardRun, **settings: Any) -> None:
    """Raise UserError for an invalid setting, prompt or key. deadline_s: reward.timeout_s."""
    check_settings(read_settings(JudgeSettings, settings), deadline_s, run.judge)
    prepare(run=run, **settings)


def prepare(*, run: RewardRun, **settings: Any) -> None:
    """Check settings, prompt and key in every process."""
    make_judge(json.dumps(settings), run)


# one judge per process, with its connections: all samples of a run have the same settings
@lru_cache(maxsize=8)
def make_judge(settings: str, run: RewardRun) -> Judge:
    """Return the judge of these settings, given as JSON."""
    given = read_settings(JudgeSettings, json.loads(settings))
    return Judge(given, read_template(given, PROMPT), run)


def check_settings(settings: JudgeSettings, deadline_s: float, judge: RunJudge | None) -> None:
    """Raise UserError if the reward's deadline would end a request that the settings allow, or the judge of the run
    cannot do what they ask for."""
    if settings.outage_s + settings.timeout_s > deadline_s:
        raise UserError(
            f"reward.timeout_s={deadline_s:g} must be at least reward.settings.outage_s={settings.outage_s:g} + "
            f"timeout_s={settings.timeout_s:g}, or a slow judge fails the sample before it is asked again: raise "
            "reward.timeout_s, or lower the settings"
        )
    if settings.base_url is not None or judge is None:
        return
    if (settings.verdict == "probability") != bool(judge.words):
        raise UserError(
            "reward.settings.verdict is probability, and the judge may write any token: set judge.allowed_tokens to "
            "[yes, no] and judge.temperature to 0"
            if settings.verdict == "probability"
            else f"reward.settings.verdict is {settings.verdict}, and judge.allowed_tokens leaves two tokens: set "
            "verdict to probability, or leave judge.allowed_tokens out"
        )
    if settings.votes > 1 and judge.is_greedy:
        raise UserError(
            "reward.settings.votes would all be equal with judge.temperature=0: raise it, or set votes to 1"
        )
