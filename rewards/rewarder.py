"""Reward processes of an engine.

Plain functions have several processes, async ones one with many calls in flight.
"""

from __future__ import annotations

import asyncio

from core.errors import UserError
from core.types.samples import Message, Prompt
from rewards.async_pool import AsyncRewardPool
from rewards.kinds import Kind
from rewards.pool import RewardPool
from rewards.scored import RewardResult, merge_results
from rewards.several import RewardPlan

NO_SIBLING = "score_group: no live sibling to compare with"


class Rewarder:
    """Reward functions of a recipe, each in the processes of its kind. `close()` kills them."""

    def __init__(self, plan: RewardPlan, workers: int, timeout_s: float, max_concurrency: int = 32) -> None:
        """workers: processes for plain functions. max_concurrency: async calls in flight, of this engine.
        timeout_s: deadline of a call."""
        self.plan = plan
        self._kinds: dict[str, list[Kind]] = {}
        """Kinds of the functions of each source."""
        self._pools: dict[Kind, RewardPool | AsyncRewardPool] = {
            kind: AsyncRewardPool(plan.select(kind), max_concurrency, timeout_s)
            if kind.is_async
            else RewardPool(plan.select(kind), workers, timeout_s)
            for kind in plan.kinds
        }

    def scores_groups(self, source: str) -> bool:
        """Tell whether a `score_group` scores the rows of a source."""
        return any(kind.is_group for kind in self._list_kinds(source))

    def is_fast(self, source: str) -> bool:
        """Tell whether `score` takes milliseconds for rows of a source, so that siblings may wait for each other."""
        return all(kind.is_group or self._pools[kind].is_fast for kind in self._list_kinds(source))

    async def compute_reward(self, prompt: Prompt, messages: list[Message]) -> RewardResult:
        """Return the result of all functions `score`; empty without one. Raises UserError for the user's mistakes."""
        [result] = await self.compute_each(prompt, [messages])
        return result

    async def compute_each(self, prompt: Prompt, conversations: list[list[Message]]) -> list[RewardResult]:
        """Return the results of several samples of a prompt, each as `compute_reward` returns it."""
        return await self._compute(prompt, conversations, is_group=False)

    async def compute_group(self, prompt: Prompt, conversations: list[list[Message]]) -> list[RewardResult]:
        """Return the results of all functions `score_group`, one per live sibling. A sibling alone fails."""
        if len(conversations) < 2:
            return [RewardResult(failure=NO_SIBLING)] * len(conversations)
        return await self._compute(prompt, conversations, is_group=True)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    async def _compute(
        self, prompt: Prompt, conversations: list[list[Message]], *, is_group: bool
    ) -> list[RewardResult]:
        pools = [self._pools[kind] for kind in self._list_kinds(prompt.source) if kind.is_group == is_group]
        calls = [(pool.compute_group if is_group else pool.compute_each)(prompt, conversations) for pool in pools]
        found = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)  # gather makes a task per call
        results = [merge_results([("", of_kind[i]) for of_kind in found]) for i in range(len(conversations))]
        if stop := next((result.stop for result in results if result.stop), ""):
            raise UserError(stop)
        return results

    def _list_kinds(self, source: str) -> list[Kind]:
        if source not in self._kinds:
            named = {*self.plan.list_names(source)}
            self._kinds[source] = sorted({f.kind for f in self.plan.functions if f.name in named})
        return self._kinds[source]
