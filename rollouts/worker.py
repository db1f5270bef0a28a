"""Rollout worker: prompts in, groups with rewards out. It owns one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from configs.agent_schema import SHARE_OF_TIMEOUT
from configs.rollout_schema import RewardConfig, RolloutConfig
from core.tasks import gather_fail_fast, start_task
from core.timing.clock import ActivityTimer
from core.timing.phases import ENGINE_ACTIVITIES, Activity
from core.timing.timeouts import wait_or_cancel
from core.types.samples import Group, Prompt, RecordedEpisode
from data_feeds.chat.demonstrations import TurnTokenizer, make_demonstration, make_recorded
from data_feeds.chat.tool_parsing import PlainParser, ReplyParser
from rewards.rewarder import Rewarder
from rewards.scored import RewardResult, merge_results
from rollouts.engines.base import Engine
from rollouts.engines.sleeping import WakePart
from rollouts.envs.base import Env
from rollouts.envs.single_turn import SingleTurn
from rollouts.episode import run_episode
from rollouts.opponents import Opponent, OpponentSlot
from rollouts.places import EpisodeTimedOut, Places
from rollouts.rewarded import Episode, RewardedSamples
from rollouts.second_reward import SecondReward
from rollouts.seeds import make_seed
from rollouts.stops import Stops
from rollouts.transcript import SharedPrompt, Tokenizer
from rollouts.turns import EpisodeRules, Played, run_single_turns

if TYPE_CHECKING:
    from rollouts.agents.episode import AgentRunner
    from rollouts.agents.processes import AgentProcesses
    from rollouts.agents.remote import RemoteAgents
    from rollouts.agents.session import AgentTokenizer
    from rollouts.judges.endpoint import JudgeEndpoint

T = TypeVar("T")


class RolloutWorker:
    """Owner of one engine and the reward processes. Weight sync calls `engine` and `timer` directly."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        make_env: Callable[[Prompt], Env],
        rewards: Rewarder,
        *,
        reward: RewardConfig,
        rollout: RolloutConfig,
        seed: int,
        stops: Stops | None = None,
        parser: ReplyParser | None = None,
        max_prompt_tokens: int | None = None,
        agents: AgentProcesses | RemoteAgents | None = None,
        judge: JudgeEndpoint | None = None,
        second: SecondReward | None = None,
        opponent: OpponentSlot | None = None,
        rank: int = 0,
    ):
        """agents: processes of `rollout.agent`, which need `stops` and `max_prompt_tokens`. judge: endpoint of this
        engine for rewards, if the policy judges. second: reward of `eval_reward`. rank: number of the engine."""
        self.engine, self.tokenizer, self.make_env, self.rewards = engine, tokenizer, make_env, rewards
        self.reward, self.rollout, self.seed, self.stops = reward, rollout, seed, stops
        self.parser, self.max_prompt_tokens = parser or PlainParser(), max_prompt_tokens
        self.timer, self.judge = ActivityTimer(*ENGINE_ACTIVITIES), judge
        self.second, self.opponent, self.rank = second, opponent, rank
        self.agents = None if agents is None else self._make_runner(agents)
        self._make_rules = partial(
            EpisodeRules,
            max_new_tokens=rollout.max_new_tokens,
            max_turns=rollout.max_turns,
            timeout_s=rollout.timeout_s,
            max_prompt_tokens=max_prompt_tokens,
            stops=stops,
            parser=self.parser,
            is_truncated=rollout.is_truncated,
            is_routed=rollout.router_replay != "off",
            in_environment=partial(self.timer.measure, Activity.ENVIRONMENT, instead_of=Activity.GENERATE),
        )
        self._make_samples = RewardedSamples(reward, tokenizer, of_agent=agents is not None).make
        self._places = Places(rollout.episodes_per_engine, rollout.timeout_s)
        self.groups: list[asyncio.Future[Any]] = []
        """Groups being generated."""
        self.played: dict[int, tuple[Prompt, list[list[Played]]]] = {}
        """Groups without rewards, by ticket: the prompt, and the episodes."""

    async def generate_group(self, ticket: int, prompt: Prompt, size: int) -> Group | None:
        """Run `size` episodes of a prompt concurrently. Return None, and cancel them, after `rollout.timeout_s`.

        An episode yields one sample, one per player, or one per branch of an agent's conversations. The prompt's
        demonstration and recorded episodes come last.
        """
        if self.judge is not None:
            await self.judge.start()
        return await self._run_group(self._make_group(ticket, prompt, size))

    async def play_group(self, ticket: int, prompt: Prompt, size: int) -> bool:
        """Run a group's episodes for `reward_group` or `forget_group`. Return False after `rollout.timeout_s`."""
        play = self._choose_episodes(ticket, prompt)
        dealt = await self._run_group(gather_fail_fast(map(play, self._deal(prompt, size)), grace_s=0))
        if dealt is None:
            return False
        self.played[ticket] = prompt, [episode for some in dealt for episode in some]
        return True

    async def reward_group(self, ticket: int) -> Group:
        """Return a group that `play_group` has played, with rewards."""
        prompt, played = self.played.pop(ticket)
        episodes = await gather_fail_fast(map(self._reward_episode, played), grace_s=0)
        return await self._finish_group(ticket, prompt, episodes)

    def forget_group(self, ticket: int) -> None:
        """Drop a played group that nobody waits for any more."""
        self.played.pop(ticket, None)

    async def _run_group(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await a group that the engine samples. Return None, and cancel it, after `rollout.timeout_s`."""
        task = start_task(work)
        self.groups.append(task)
        try:
            return await wait_or_cancel(task, self.rollout.timeout_s if self._places.limit is None else None)
        except EpisodeTimedOut:
            return None
        finally:
            self.groups.remove(task)

    async def _make_group(self, ticket: int, prompt: Prompt, size: int) -> Group:
        play = self._choose_episodes(ticket, prompt)

        async def run(siblings: range) -> list[Episode]:
            return await self._reward_episodes(prompt, await play(siblings))

        # an episode that timed out cancels the others of the group
        dealt = await gather_fail_fast(map(run, self._deal(prompt, size)), grace_s=0)
        return await self._finish_group(ticket, prompt, [episode for some in dealt for episode in some])

    def _deal(self, prompt: Prompt, size: int) -> list[range]:
        """Return the numbers of siblings sampled together: all, or each alone if its reward should not wait."""
        is_plain = self.agents is None and self.opponent is None and self.make_env is SingleTurn
        if is_plain and self._places.limit is None and self.rewards.is_fast(prompt.source):
            return [range(size)]
        return [range(n, n + 1) for n in range(size)]

    def _choose_episodes(
        self, ticket: int, prompt: Prompt
    ) -> Callable[[range], Coroutine[Any, Any, list[list[Played]]]]:
        """Return the function that plays episodes of a group, by number."""
        # samples refer to their prompt, which need not repeat what joins the group as samples
        prompt = replace(prompt, recorded=())
        if self.agents is not None:
            return partial(self._play_agent, ticket, prompt)
        opponent = None if self.opponent is None else self.opponent.enter(ticket)
        return partial(self._play_episodes, SharedPrompt(self.tokenizer), opponent, ticket, prompt)

    async def _finish_group(self, ticket: int, prompt: Prompt, episodes: list[Episode]) -> Group:
        """Return the samples of rewarded episodes, with those of the prompt's own."""
        recorded, prompt = prompt.recorded, replace(prompt, recorded=())
        episodes += await self._reward_given(episodes, recorded)
        if self.rewards.scores_groups(prompt.source):
            with self.timer.measure(Activity.REWARD):
                episodes = await self._reward_siblings(prompt, episodes)
        made = [pair for episode in episodes for pair in zip(episode.played, self._make_samples(episode), strict=True)]
        if ticket >= 0:
            return [sample for _, sample in made]
        # negative: of an evaluation, and nothing is trained on these
        made = [(played, replace(sample, routes=None)) for played, sample in made]
        if self.second is None:
            return [sample for _, sample in made]
        with self.timer.measure(Activity.REWARD):
            return await asyncio.gather(*(self.second.add(played.messages, sample) for played, sample in made))

    async def _reward_given(self, episodes: Sequence[Episode], recorded: Sequence[RecordedEpisode]) -> list[Episode]:
        """Return the demonstration of the group's prompt and its recorded episodes, rewarded."""
        group = [played.sample for episode in episodes for played in episode.played]
        # as the policy saw it, with the tools of the environment; an episode that failed may not have seen them
        prompt = next((s.prompt for s in group if not s.failure), group[0].prompt)
        # a tokenizer without turns, such as a simulator's, has no demonstrations
        tokenizer = cast(TurnTokenizer, self.tokenizer)
        played = [Played(sample=make_recorded(tokenizer, prompt, one), messages=one.messages) for one in recorded]
        if prompt.demonstration:
            played.insert(0, Played(sample=make_demonstration(tokenizer, prompt), messages=prompt.demonstration))
        with self.timer.measure(Activity.REWARD):
            return await asyncio.gather(*(self._reward_players([one]) for one in played))

    async def _play_episodes(
        self, tokenizer: SharedPrompt, opponent: Opponent | None, ticket: int, prompt: Prompt, siblings: range
    ) -> list[list[Played]]:
        rules = self._make_rules(seed_of_turn=partial(make_seed, self.seed, ticket, siblings.start))
        # except while the policy waits for the environment
        async with self._places.take():
            with self.timer.measure(Activity.GENERATE):
                if opponent is None and self.make_env is SingleTurn:
                    played = await run_single_turns(self.engine, prompt, tokenizer, rules, size=len(siblings))
                    return [[one] for one in played]
                return [await run_episode(self.engine, self.make_env, prompt, tokenizer, rules, opponent)]

    async def _play_agent(self, ticket: int, prompt: Prompt, siblings: range) -> list[list[Played]]:
        assert self.agents is not None
        [sibling] = siblings
        async with self._places.take():
            with self.timer.measure(Activity.ENVIRONMENT):  # except while the engine samples for it
                seed_of_turn = partial(make_seed, self.seed, ticket, sibling)
                return [await self.agents.play(prompt, episode=sibling, seed_of_turn=seed_of_turn)]

    async def _reward_episodes(self, prompt: Prompt, played: list[list[Played]]) -> list[Episode]:
        """Return episodes that were sampled together, rewarded."""
        if len(played) == 1:
            return [await self._reward_episode(played[0])]
        with self.timer.measure(Activity.REWARD):
            results = await self.rewards.compute_each(prompt, [one.messages for [one] in played])
        return [Episode(played=own, results=[result]) for own, result in zip(played, results, strict=True)]

    async def _reward_episode(self, played: list[Played]) -> Episode:
        with self.timer.measure(Activity.REWARD):
            if self.agents is None:
                return await self._reward_players(played)
            # one reward per episode of an agent, shared by all branches
            return Episode(played=played, results=[await self._compute_reward(played[0])], is_shared=True)

    async def _reward_players(self, played: list[Played]) -> Episode:
        if len(played) == 1:  # without a task, of which a step has one per sample already
            return Episode(played=played, results=[await self._compute_reward(played[0])])
        return Episode(played=played, results=await asyncio.gather(*map(self._compute_reward, played)))

    async def _compute_reward(self, played: Played) -> RewardResult:
        # a failed sample has no reward, and is not trained on
        if played.sample.failure:
            return RewardResult(failure=played.sample.failure)
        return await self.rewards.compute_reward(played.sample.prompt, played.messages)

    async def _reward_siblings(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Episode]:
        """Add the results of `score_group`, which compares the live siblings: in a game, those of each player."""
        sides = sorted({played.sample.player for episode in episodes for played in episode.played})
        results = [[*episode.results] for episode in episodes]
        for side in sides:
            # of an agent's branches, the first stands for the episode
            live = [
                (e, i)
                for e, episode in enumerate(episodes)
                for i, result in enumerate(episode.results)
                if episode.played[i].sample.player == side and not result.failure
            ]
            conversations = [episodes[e].played[i].messages for e, i in live]
            for (e, i), found in zip(live, await self.rewards.compute_group(prompt, conversations), strict=True):
                results[e][i] = merge_results([("", results[e][i]), ("", found)])
        return [replace(episode, results=own) for episode, own in zip(episodes, results, strict=True)]

    def _make_runner(self, agents: AgentProcesses | RemoteAgents) -> AgentRunner:
        from rollouts.agents.episode import AgentRunner
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
            is_routed=self.rollout.router_replay != "off",
        )
        timeout_s = agents.plan.timeout_s or SHARE_OF_TIMEOUT * self.rollout.timeout_s
        return AgentRunner(agents, sampler, timeout_s=timeout_s, address=self.rollout.gateway, engine=self.rank)

    async def start_trace(self, trace: bool, memory: bool) -> None:
        """Start to profile the engine."""
        await self.engine.start_trace(trace=trace, memory=memory)

    async def stop_trace(self, stem: Path) -> list[str]:
        """Write the profile of the engine; return the names of the files."""
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
        if self.second is not None:
            self.second.rewards.close()
        for part in (self.judge, self.opponent):
            if part is not None:
                await part.close()
        await self.engine.close()
