"""Agents of a worker: the settings that they are played with, their seeds, and one reward for all branches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from core.types.samples import Group
from core.types.truncation import Truncation
from rollouts.agents.results import AgentResult
from rollouts.agents.session import Request, Sampler
from rollouts.agents.task import AgentPlan, Task
from rollouts.agents.wire import ChatRequest
from rollouts.seeds import make_seed
from rollouts.stops import Stops
from rollouts.worker import RolloutWorker
from unit_tests.helpers.episodes import Tool, Words
from unit_tests.helpers.sentences import tell
from unit_tests.helpers.workers import PROMPT, Digits, Rewards, a_worker

OTHER: Any = [{"role": "user", "content": "7"}]


class Numbers(Words):
    """Words whose 6 ends a turn."""

    def __init__(self) -> None:
        self.stop_token_ids, self.turn_end, self.written_ids = [6], [6], frozenset(range(99))


class Agent:
    """Takes the place of an agent's processes: asks once in each of some conversations."""

    def __init__(self, *asks: Any, timeout_s: float | None = None) -> None:
        self.plan, self.asks = AgentPlan(timeout_s=timeout_s), asks
        self.tasks: list[Task] = []
        self.deadlines: list[float] = []
        self.is_closed = False
        self.worker: RolloutWorker

    async def run(self, task: Task, *, timeout_s: float, log: bytearray) -> AgentResult:
        self.tasks.append(task)
        self.deadlines.append(timeout_s)
        assert self.worker.agents is not None
        sessions = self.worker.agents.gateway.sessions.values()
        [session] = [session for session in sessions if session.key == task.api_key]
        for messages in self.asks:
            request = Request(ask=ChatRequest(messages=messages, tools=[]), digest=repr(messages), retry=0)
            async with session.answering(request):
                pass
        return AgentResult(parts={"won": 4.0})

    async def close(self) -> None:
        self.is_closed = True


def make(engine: Any, rewards: Any, agent: Any, **more: Any) -> RolloutWorker:
    tokenizer: Any = Numbers()
    stops = Stops(tokenizer, [], [])
    worker = a_worker(engine, rewards, tokenizer=tokenizer, stops=stops, max_prompt_tokens=7, agents=agent, **more)
    agent.worker = worker
    return worker


def says() -> Digits:
    return Digits(0.0, token_ids=[5, 6], logp=[-0.5, -0.25], versions=[0, 0])


def play(worker: RolloutWorker, size: int) -> Group:
    """Play the group of ticket 4."""

    async def run() -> Group:
        try:
            return await worker.generate_group(4, PROMPT, size) or []
        finally:
            await worker.close()

    return asyncio.run(run())


def test_replies_to_an_agent_are_sampled_by_the_recipe():
    rollout = {"temperature": 0.5, "top_p": 0.9, "router_replay": "watch"}
    worker = make(says(), Rewards(), Agent(), rollout=rollout)
    assert worker.agents is not None and worker.stops is not None
    tokenizer: Any = worker.tokenizer
    assert worker.agents.sampler == Sampler(
        engine=worker.engine,
        tokenizer=tokenizer,
        stops=worker.stops,
        parser=worker.parser,
        timer=worker.timer,
        temperature=0.5,
        max_new_tokens=20,
        max_turns=3,
        max_model_len=27,
        truncation=Truncation(top_p=0.9),
        is_routed=True,
    )
    plain = make(says(), Rewards(), Agent())
    assert plain.agents is not None and not plain.agents.sampler.is_routed


@pytest.mark.parametrize(("of_plan", "deadline"), [(None, 54.0), (7.0, 7.0)])
def test_an_agent_has_its_own_deadline_or_nine_tenths_of_the_groups(of_plan, deadline):
    agent = Agent(PROMPT.messages, timeout_s=of_plan)
    play(make(says(), Rewards(seconds=0.0), agent), 2)
    assert agent.deadlines == [deadline] * 2 and agent.is_closed


def test_each_episode_of_an_agent_has_its_seeds_its_number_and_its_engine():
    address = {"agent": {"file": "mine.py"}, "gateway": {"url": "https://policy.example.org/{engine}/{port}"}}
    agent, engine = Agent(PROMPT.messages), says()
    group = play(make(engine, Rewards(seconds=0.0), agent, rollout=address, rank=3), 3)
    assert sorted(task.seed for task in agent.tasks) == [make_seed(11, 4, sibling, "agent") for sibling in range(3)]
    assert sorted(one["seed"] for one in engine.asked) == [make_seed(11, 4, sibling, 0) for sibling in range(3)]
    assert [sample.episode for sample in group] == [0, 1, 2]
    assert all(task.base_url.startswith("https://policy.example.org/3/") for task in agent.tasks)


def test_all_branches_of_an_agent_share_the_reward_of_its_last_reply():
    rewards = Rewards(seconds=0.0)
    weights = {"n": 0.5, "won": 2.0}
    group = play(make(says(), rewards, Agent(PROMPT.messages, OTHER), weights=weights), 2)
    assert rewards.asked == [["7", "5 6"]] * 2 + ["closed"]
    assert [sample.token_ids.tolist() for sample in group] == [[1, 2, 5, 6], [7, 5, 6]] * 2
    assert [sample.episode for sample in group] == [0, 0, 1, 1]
    assert [(s.reward, s.reward_parts) for s in group] == [(0.5 * 2 + 2.0 * 4, {"n": 2.0, "won": 4.0})] * 4
    assert [sample.counts.get("judge/calls") for sample in group] == [1.0, None] * 2


def test_one_branch_stands_for_an_episode_where_siblings_are_compared():
    rewards = Rewards(seconds=0.0, compares=True)
    group = play(make(says(), rewards, Agent(PROMPT.messages, OTHER), weights={"place": 3.0}), 2)
    assert rewards.asked[2:] == [["5 6", "5 6"], "closed"]
    assert [(s.reward, s.reward_parts["of"]) for s in group] == [(0.0, 2.0), (0.0, 2.0), (3.0, 2.0), (3.0, 2.0)]


class Counting(Tool):
    def scores(self) -> dict[str, float]:
        return {"n": 1.0}


@pytest.mark.parametrize("who", ["agent", "environment"])
def test_whoever_returns_the_same_part_as_the_reward_is_named(who):
    class Winning(Rewards):
        def score(self, prompt, messages):
            result = super().score(prompt, messages)
            result.reward_parts["won"] = 1.0
            return result

    if who == "agent":
        worker = make(says(), Winning(seconds=0.0), Agent(PROMPT.messages))
    else:
        worker = a_worker(says(), Rewards(seconds=0.0), Counting)
    part = "won" if who == "agent" else "n"
    assert tell(lambda: play(worker, 1)) == f"reward and {who} both return a part '{part}': rename one of them"
