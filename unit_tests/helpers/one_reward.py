"""One reward function and one of its results, for tests of the processes that compute rewards."""

from __future__ import annotations

from typing import Any

from core.loading import FileSpec
from core.types.messages import Message
from core.types.samples import Prompt
from rewards.kinds import find_kind
from rewards.pool import RewardPool, RewardResult
from rewards.several import NamedReward, RewardPlan


def one_reward(spec: FileSpec, settings: dict[str, Any] | None = None) -> RewardPlan:
    """Return the plan of a single function, whose parts keep their names."""
    only = NamedReward(name="", spec=spec, settings=settings or {}, kind=find_kind(spec))
    return RewardPlan(functions=(only,), otherwise=("",))


async def compute_one(pool: RewardPool, prompt: Prompt, messages: list[Message]) -> RewardResult:
    """Return the result of a single conversation."""
    [result] = await pool.compute_group(prompt, [messages])
    return result
