"""Prompts in, groups with rewards out. One worker owns one engine; the driver sees only groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from configs.rollout_schema import RewardConfig, RolloutConfig
from core.clock import ActivityTimer, with_timeout
from core.errors import UserError
from core.phases import ENGINE_ACTIVITIES, Activity
from core.types import Group, Prompt, Sample
from rewards.pool import RewardPool
from rewards.weights import weigh_parts
from rollouts.engines.base import Engine
from rollouts.envs.base import Env
from rollouts.episode import Tokenizer, make_seed, run_episode
from rollouts.stops import Stops


class RolloutWorker:
    """Owner of one engine with its reward processes. Weight sync calls `engine` and `timer` directly."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        make_env: Callable[[Prompt], Env],
        rewards: RewardPool,
        *,
        reward: RewardConfig,
        rollout: RolloutConfig,
        seed: int,
        stops: Stops | None = None,
    ):
        self.engine, self.tokenizer, self.make_env, self.rewards = engine, tokenizer, make_env, rewards
        self.reward, self.rollout, self.seed, self.stops = reward, rollout, seed, stops
        self.timer = ActivityTimer(*ENGINE_ACTIVITIES)

    async def generate_group(self, ticket: int, prompt: Prompt, size: int) -> Group | None:
        """Run `size` episodes of a prompt at once; return None and cancel them after `rollout.timeout_s`."""
        episodes = asyncio.gather(*(self._run_episode(ticket, prompt, sibling) for sibling in range(size)))
        return await with_timeout(episodes, self.rollout.timeout_s)

    async def _run_episode(self, ticket: int, prompt: Prompt, sibling: int) -> Sample:
        with self.timer.measure(Activity.GENERATE):
            sample, messages = await run_episode(
                self.engine,
                self.make_env,
                prompt,
                self.tokenizer,
                seed_of_turn=lambda turn: make_seed(self.seed, ticket, sibling, turn),
                max_new_tokens=self.rollout.max_new_tokens,
                max_turns=self.rollout.max_turns,
                timeout_s=self.rollout.timeout_s,
                stops=self.stops,
            )
        if sample.failure:
            return sample
        with self.timer.measure(Activity.REWARD):
            result = await self.rewards.compute_reward(prompt, messages)
        if result.failure:
            return replace(sample, failure=result.failure)
        if twice := result.reward_parts.keys() & sample.reward_parts.keys():
            raise UserError(f"reward and environment both return a part {min(twice)!r}: rename one of them")
        parts = result.reward_parts | sample.reward_parts
        return replace(sample, reward_parts=parts, reward=weigh_parts(self.reward, parts, prompt.source))

    async def close(self) -> None:
        """End the reward processes and the engine."""
        self.rewards.close()
        await self.engine.close()
