"""Replies scored by the rewards judge and rubric, against a server."""

from __future__ import annotations

import asyncio
from typing import Any

from core.types.samples import Prompt
from rewards import RewardRun, judge

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "Write sevens."}], answer="77")


def score_at(
    url: str, *replies: str, reward: Any = judge, run: RewardRun | None = None, prompt: Prompt = PROMPT, **settings: Any
) -> list[Any]:
    """Score replies as in a reward process: a result, or what was raised."""

    async def score_all() -> list[Any]:
        reward.make_judge.cache_clear()  # its connections are of another event loop
        given = {"base_url": url, "model": "j", "outage_s": 0.5, "timeout_s": 5.0, **settings}
        given = {name: value for name, value in given.items() if value is not None}
        messages = [[{"role": "assistant", "content": reply}] for reply in replies]
        calls = [reward.score(prompt, one, run=run or RewardRun(), **given) for one in messages]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(score_all())
