"""Rollout worker: prompts in, groups with rewards out. It owns one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from configs.rollout_schema import RewardConfig, RolloutConfig
from core.errors import UserError
from core.timing.clock import ActivityTimer
from core.timing.phases import ENGINE_ACTIVITIES, Activity
from core.timing.timeouts import wait_or_cancel
from core.types.samples import Group, Prompt, Sample
from data_feeds.chat.demonstrations import TurnTokenizer, make_demonstration
from data_feeds.chat.tool_parsing import PlainParser, ReplyParser
from rewards.pool import RewardPool
from rewards.weights import weigh_parts, weigh_turns
from rollouts.engines.base import Engine
from rollouts.engines.sleeping import WakePart
from rollouts.envs.base import Env
from rollouts.episode import EpisodeRules, Played, make_seed, run_episode
from rollouts.stops import Stops
from rollouts.transcript import SharedPrompt, Tokenizer

if TYPE_CHECKING:
    from rollouts.agents.episode import AgentRunner
    from rollouts.agents.processes import AgentProcesses
    from rollouts.agents.session import AgentTokenizer


class RolloutWorker:
    """Owner of one engine and the reward processes. Weight sync calls `engine` and `timer` directly."""

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
        parser: ReplyParser | None = None,
        max_prompt_tokens: int | None = None,
        agents: AgentProcesses | None = None,
    ):
        """agents: processes of `rollout.agent`, in place of an environment. They need `stops` and
        `max_prompt_tokens`."""
        self.engine, self.tokenizer, self.make_env, self.rewards = engine, tokenizer, make_env, rewards
        self.reward, self.rollout, self.seed, self.stops = reward, rollout, seed, stops
        self.parser, self.max_prompt_tokens = parser or PlainParser(), max_prompt_tokens
        self.timer = ActivityTimer(*ENGINE_ACTIVITIES)
        self.agents = None if agents is None else self._make_runner(agents)
        self.groups: list[asyncio.Future[Any]] = []
        """Groups being generated."""

    async def generate_group(self, ticket: int, prompt: Prompt, size: int) -> Group | None:
        """Run `size` episodes of a prompt concurrently. Return None, and cancel them, after `rollout.timeout_s`.

        An episode yields one sample, one per player, or one per branch of an agent's conversations. The prompt's
        demonstration comes last.
        """
        run = self._run_agent
        if self.agents is None:
            run = partial(self._run_episode, SharedPrompt(self.tokenizer))
        episodes = asyncio.gather(*(run(ticket, prompt, sibling) for sibling in range(size)))
        self.groups.append(episodes)
        try:
            samples = await wait_or_cancel(episodes, self.rollout.timeout_s)
        finally:
            self.groups.remove(episodes)
        # None: the driver counts the timeout, and tries another engine
        return None if samples is None else await self._with_demonstration([*chain.from_iterable(samples)])

    async def _with_demonstration(self, group: Group) -> Group:
        """Append the demonstration of the group's prompt, with its reward."""
        # as the policy saw it, with the tools of the environment; an episode that failed may not have seen them
        prompt = next((s.prompt for s in group if not s.failure), group[0].prompt)
        if not prompt.demonstration:
            return group
        # a tokenizer without turns, such as a simulator's, has no demonstrations
        sample = make_demonstration(cast(TurnTokenizer, self.tokenizer), prompt)
        with self.timer.measure(Activity.REWARD):
            return [*group, await self._reward_sample(Played(sample=sample, messages=prompt.demonstration))]

    async def _run_episode(self, tokenizer: SharedPrompt, ticket: int, prompt: Prompt, sibling: int) -> list[Sample]:
        rules = EpisodeRules(
            seed_of_turn=lambda turn: make_seed(self.seed, ticket, sibling, turn),
            max_new_tokens=self.rollout.max_new_tokens,
            max_turns=self.rollout.max_turns,
            timeout_s=self.rollout.timeout_s,
            max_prompt_tokens=self.max_prompt_tokens,
            stops=self.stops,
            parser=self.parser,
            is_truncated=self.rollout.is_truncated,
            in_environment=self._waiting_for_environment,
        )
        # except while the policy waits for the environment
        with self.timer.measure(Activity.GENERATE):
            played = await run_episode(self.engine, self.make_env, prompt, tokenizer, rules)
        with self.timer.measure(Activity.REWARD):
            if len(played) == 1:
                return [await self._reward_sample(played[0])]
            return await asyncio.gather(*map(self._reward_sample, played))

    async def _run_agent(self, ticket: int, prompt: Prompt, sibling: int) -> list[Sample]:
        assert self.agents is not None
        with self.timer.measure(Activity.ENVIRONMENT):  # except while the engine samples for it
            played = await self.agents.play(
                prompt,
                episode=sibling,
                seed_of_turn=lambda turn: make_seed(self.seed, ticket, sibling, turn),
            )
        with self.timer.measure(Activity.REWARD):  # one reward per episode, shared by all branches
            first = await self._reward_sample(played[0])
        return [
            replace(one.sample, reward=first.reward, reward_parts=first.reward_parts, failure=first.failure)
            for one in played
        ]

    async def _reward_sample(self, played: Played) -> Sample:
        sample, prompt = played.sample, played.sample.prompt
        # a failed sample has no reward, and is not trained on
        if sample.failure:
            return sample
        result = await self.rewards.compute_reward(prompt, played.messages)
        if result.failure:
            return replace(sample, failure=result.failure)
        # a silent overwrite would drop one of the two numbers
        twice = result.reward_parts.keys() & sample.reward_parts.keys()
        # the number of replies, which that reward returns for want of another, gives way to the environment's own
        if twice and self.reward.function != "environment":
            who = "environment" if self.agents is None else "agent"
            raise UserError(f"reward and {who} both return a part {min(twice)!r}: rename one of them")
        parts = result.reward_parts | sample.reward_parts
        return replace(
            sample,
            reward_parts=parts,
            reward=weigh_parts(self.reward, parts, prompt.source),
            turn_rewards=weigh_turns(self.reward, played.turn_scores, prompt.source),
        )

    @contextmanager
    def _waiting_for_environment(self) -> Generator[None]:
        """Attribute the body's time to the environment, instead of generation."""
        self.timer.end_activity(Activity.GENERATE)
        try:
            with self.timer.measure(Activity.ENVIRONMENT):
                yield
        finally:
            self.timer.begin_activity(Activity.GENERATE)

    def _make_runner(self, agents: AgentProcesses) -> AgentRunner:
        from rollouts.agents.episode import SHARE_OF_TIMEOUT, AgentRunner
        from rollouts.agents.session import Sampler

        assert self.stops is not None and self.max_prompt_tokens is not None
        sampler = Sampler(
            engine=self.engine,
            tokenizer=cast("AgentTokenizer", self.tokenizer),  # a simulator's, without this method, has no agents
            stops=self.stops,
            parser=self.parser,
            timer=self.timer,
            temperature=self.rollout.temperature,
            max_new_tokens=self.rollout.max_new_tokens,
            max_turns=self.rollout.max_turns,
            max_model_len=self.max_prompt_tokens + self.rollout.max_new_tokens,
            truncation=self.rollout.truncation,
        )
        return AgentRunner(agents, sampler, timeout_s=SHARE_OF_TIMEOUT * self.rollout.timeout_s)

    async def start_trace(self, trace: bool, memory: bool) -> None:
        """Start to profile the engine."""
        await self.engine.start_trace(trace=trace, memory=memory)

    async def stop_trace(self, stem: Path) -> list[str]:
        """Write the profile of the engine; return the names of its files."""
        return await self.engine.stop_trace(stem)

    async def sleep(self) -> None:
        """Wait for groups that a finished run left running, then put the engine to sleep."""
        while self.groups:
            await asyncio.wait(self.groups)
            await asyncio.sleep(0)  # generate_group removes the group in its next step
        with self.timer.measure(Activity.SLEEP):
            await self.engine.sleep()

    async def wake(self, part: WakePart) -> None:
        """Wake a part of the engine."""
        with self.timer.measure(Activity.WAKE):
            await self.engine.wake(part)

    async def close(self) -> None:
        """Close the agents, the reward processes and the engine."""
        if self.agents is not None:
            # before the engine, to which agents send requests
            await self.agents.close()
        self.rewards.close()
        await self.engine.close()
