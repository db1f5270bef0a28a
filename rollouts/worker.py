"""Prompts in, scored groups out. One worker owns one engine; the driver sees only groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from configs.rollout_schema import RewardConfig, RolloutConfig
from core.clock import Ledger, in_time
from core.errors import UserError
from core.types import Group, Prompt, Sample
from rewards.pool import RewardPool
from rollouts.engines.base import Engine
from rollouts.envs import Env
from rollouts.episode import Tokenizer, run_episode, seed_of


class RolloutWorker:
    """`engine` is public: weight sync talks to it directly."""

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
    ):
        self.engine, self.tokenizer, self.make_env, self.rewards = engine, tokenizer, make_env, rewards
        self.reward, self.rollout, self.seed = reward, rollout, seed
        self.ledger = Ledger("sync", "generate", "score")

    async def group(self, ticket: int, prompt: Prompt, size: int) -> Group | None:
        """`size` episodes of a prompt, all in flight at once.

        None where they take longer than `rollout.timeout_s`: they are given up then, and hold up nothing any more.
        """
        episodes = asyncio.gather(*(self._sample(ticket, prompt, sibling) for sibling in range(size)))
        return await in_time(episodes, self.rollout.timeout_s)

    async def _sample(self, ticket: int, prompt: Prompt, sibling: int) -> Sample:
        with self.ledger.doing("generate"):
            sample, said = await run_episode(
                self.engine,
                self.make_env,
                prompt,
                self.tokenizer,
                seed=lambda turn: seed_of(self.seed, ticket, sibling, turn),
                max_new_tokens=self.rollout.max_new_tokens,
                max_turns=self.rollout.max_turns,
            )
        if sample.failure:
            return sample
        with self.ledger.doing("score"):
            outcome = await self.rewards.score(prompt, said)
        if outcome.failure:
            return replace(sample, failure=outcome.failure)
        if twice := outcome.parts.keys() & sample.parts.keys():
            raise UserError(f"reward and environment both return a part {min(twice)!r}: rename one of them")
        parts = outcome.parts | sample.parts
        return replace(sample, parts=parts, reward=self.total(parts))

    def total(self, parts: dict[str, float]) -> float:
        if missing := [name for name in self.reward.weights if name not in parts]:
            raise UserError(
                f"reward.weights names {missing[0]!r}, but the reward returns only {', '.join(sorted(parts))}: "
                "correct the name"
            )
        return sum(weight * parts[name] for name, weight in self.reward.weights.items())

    async def close(self) -> None:
        self.rewards.close()
        await self.engine.close()
