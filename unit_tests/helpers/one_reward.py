"""The plan of one reward function, for tests of the processes that compute rewards."""

from __future__ import annotations

from typing import Any

from core.loading import FileSpec
from rewards.kinds import find_kind
from rewards.several import NamedReward, RewardPlan


def one_reward(spec: FileSpec, settings: dict[str, Any] | None = None) -> RewardPlan:
    """Return the plan of a single function, whose parts keep their names."""
    only = NamedReward(name="", spec=spec, settings=settings or {}, kind=find_kind(spec))
    return RewardPlan(functions=(only,), otherwise=("",))
