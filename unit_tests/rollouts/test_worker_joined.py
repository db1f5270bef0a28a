"""What joins a worker's group, and what ends it at once: an episode without time, or a reward that breaks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from core.errors import CallFailed
from core.types.samples import RecordedEpisode
from rollouts.seeds import make_seed
from tools.benchmarks.simulated_run import run_in_virtual_time
from unit_tests.helpers.episodes import Tool
from unit_tests.helpers.workers import PROMPT, Digits, Rewards, Turns, a_worker

SHOWN: Any = [{"role": "assistant", "content": "6 7"}]


def test_an_episode_without_time_ends_its_group_at_once():
    """The third episode has its place then, and most of its time."""

    async def body() -> None:
        now = asyncio.get_running_loop().time
        worker = a_worker(Digits(61.0), Rewards(), Tool, {"max_concurrency": 2})
        assert await worker.generate_group(4, PROMPT, 3) is None and now() == 60.0
        assert await worker.play_group(4, PROMPT, 3) is False and now() == 120.0
        assert worker.groups == [] and worker.played == {}

    run_in_virtual_time(body())


class Breaking(Rewards):
    """The first of several rewards breaks; the others take long."""

    async def compute_reward(self, prompt, messages):
        if not self.asked:
            self.asked.append("the first")
            raise CallFailed("the process of the reward is gone")
        return await super().compute_reward(prompt, messages)


def test_a_reward_that_breaks_ends_its_group_at_once():
    async def body() -> None:
        now = asyncio.get_running_loop().time
        worker = a_worker(Digits(5.0), Breaking(seconds=40.0), Tool)
        with pytest.raises(CallFailed, match=r"^the process of the reward is gone$"):
            await worker.generate_group(4, PROMPT, 3)
        assert now() == 5.0 and worker.groups == []
        worker = a_worker(Digits(5.0), Breaking(seconds=40.0), Tool)
        assert await worker.play_group(4, PROMPT, 3)
        with pytest.raises(CallFailed, match=r"^the process of the reward is gone$"):
            await worker.reward_group(4)
        assert now() == 10.0 and worker.played == {}

    run_in_virtual_time(body())


def test_a_demonstration_follows_the_prompt_that_the_policy_saw():
    """The environment of the first sibling fails before it has shown anything."""
    opened: list[int] = []

    class Opening(Tool):
        async def open(self):
            opened.append(len(opened))
            if opened[-1] == 0:
                raise OSError("no room")
            return [{"role": "user", "content": "8"}]

    async def body() -> None:
        worker = a_worker(Digits(), Rewards(), Opening, tokenizer=Turns())
        group = await worker.generate_group(4, replace(PROMPT, demonstration=SHOWN), 2) or []
        assert [bool(sample.failure) for sample in group] == [True, False, False]
        assert [sample.token_ids.tolist()[:3] for sample in group] == [[1, 2], [1, 2, 8], [1, 2, 8]]
        assert group[2].token_ids.tolist() == [1, 2, 8, 6, 7] and group[2].prompt == group[1].prompt

    run_in_virtual_time(body())


def test_whatever_joins_a_group_is_compared_with_it():
    """The row that a reward is given does not repeat it: the rewards of this test refuse that."""
    recorded = RecordedEpisode(
        messages=[{"role": "assistant", "content": "8"}], completion="8", token_ids=[1, 2, 8], logp=[None, None, -0.25]
    )
    prompt = replace(PROMPT, demonstration=SHOWN, recorded=(recorded,))

    async def body() -> None:
        rewards = Rewards(compares=True)
        worker = a_worker(Digits(), rewards, Tool, tokenizer=Turns(), weights={"place": 3.0})
        group = await worker.generate_group(4, prompt, 2) or []
        said = [str(sample.token_ids[-1]) for sample in group[:2]]
        assert rewards.asked[-1] == [*said, "6 7", "8"]
        assert [sample.reward for sample in group] == [0.0, 3.0, 6.0, 9.0]

    run_in_virtual_time(body())


@pytest.mark.parametrize(
    ("sibling", "turn", "seed"),
    [(0, 3, 2375146855782054025), (2, 3, 2375146855782054027), (0, "agent", 4243621226796782425)],
)
def test_seeds_of_replies_stay_those_of_earlier_versions(sibling, turn, seed):
    """Or a run that is resumed with a newer version would sample other replies."""
    assert make_seed(11, 4, sibling, turn) == seed
