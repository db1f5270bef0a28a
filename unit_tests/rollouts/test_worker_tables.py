"""A worker's groups in tables: the order of samples, who is rewarded with whom, the limits, and the seconds.

Rewards are computed in this process, and time is virtual; test_worker.py has real reward processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.errors import RunStopped, UserError
from core.types.messages import Message
from core.types.samples import Group, RecordedEpisode
from data_feeds.chat.tool_parsing import PlainParser
from rollouts.envs.single_turn import SingleTurn
from rollouts.opponents import OpponentSlot
from rollouts.seeds import make_seed
from rollouts.stops import Stops
from tools.benchmarks.simulated_run import run_in_virtual_time
from unit_tests.helpers.episodes import Duel, Tool, Words
from unit_tests.helpers.sentences import tell
from unit_tests.helpers.workers import PROMPT, Digits, Rewards, Turns, a_worker


def digits_of(seeds: list[int]) -> list[list[int]]:
    return [[1, 2, 50 + seed % 40] for seed in seeds]


SEEDS = [make_seed(11, 4, sibling, 0) for sibling in range(3)]
MADE = digits_of(SEEDS)
LAST = f"{MADE[1][-1]}"


def test_a_group_played_and_rewarded_later_is_the_group_made_at_once():
    async def body() -> None:
        for env, fast in ((SingleTurn, True), (SingleTurn, False), (Tool, False), (Tool, True)):
            rewards = Rewards(fast=fast, fails=LAST)
            worker = a_worker(Digits(), rewards, env)
            whole = await worker.generate_group(4, PROMPT, 3)
            at_once = fast and env is SingleTurn
            assert rewards.asked == ([3] if at_once else [[f"{ids[-1]}"] for ids in MADE])
            assert whole is not None and [s.token_ids.tolist() for s in whole] == MADE
            assert [(s.reward, s.failure) for s in whole] == [(0.5, ""), (None, "no such digit"), (0.5, "")]
            assert await worker.play_group(4, PROMPT, 3) and await worker.play_group(5, PROMPT, 1)
            assert len(rewards.asked) == (1 if at_once else 3), "nothing is rewarded yet"
            later = await worker.reward_group(4)
            # an episode of its own for each reward, so the counts of calls are the same
            assert later == whole and [*worker.played] == [5]
            worker.forget_group(5)
            worker.forget_group(5)
            assert worker.played == {}

    run_in_virtual_time(body())


def test_a_group_that_takes_too_long_is_none_and_leaves_nothing():
    async def body() -> None:
        worker = a_worker(Digits(61.0), Rewards())
        assert await worker.generate_group(4, PROMPT, 3) is None and await worker.play_group(4, PROMPT, 3) is False
        assert asyncio.get_running_loop().time() == 120.0 and worker.played == {} and worker.groups == []
        # the reward counts towards the group that is made at once, and has no deadline of the group later
        worker = a_worker(Digits(50.0), Rewards(seconds=20.0))
        assert await worker.generate_group(4, PROMPT, 3) is None
        assert await worker.play_group(4, PROMPT, 3) is True and len(await worker.reward_group(4)) == 3
        # with places, each episode has a deadline of its own
        few = a_worker(Digits(50.0), Rewards(), Tool, {"max_concurrency": 1})
        assert len(await few.generate_group(4, PROMPT, 3) or []) == 3
        slow = a_worker(Digits(61.0), Rewards(), Tool, {"max_concurrency": 1})
        assert await slow.generate_group(4, PROMPT, 3) is None

    run_in_virtual_time(body())


def test_demonstration_and_recorded_episodes_come_last_and_are_rewarded():
    recorded = RecordedEpisode(
        messages=[{"role": "assistant", "content": "8"}],
        completion="8",
        token_ids=[1, 2, 8],
        logp=[None, None, -0.25],
        stop="length",
    )
    other = replace(recorded, messages=[{"role": "assistant", "content": "9"}], completion="9", token_ids=[1, 2, 9])
    prompt = replace(PROMPT, demonstration=[{"role": "assistant", "content": "6 7"}], recorded=(recorded, other))

    async def body() -> Group:
        rewards = Rewards(fast=True, fails="9")
        worker = a_worker(Digits(), rewards, tokenizer=Turns())
        group = await worker.generate_group(4, prompt, 2)
        assert rewards.asked == [2, ["6 7"], ["8"], ["9"]] and group is not None
        return group

    group = run_in_virtual_time(body())
    assert [s.token_ids.tolist() for s in group] == [*MADE[:2], [1, 2, 6, 7], [1, 2, 8], [1, 2, 9]]
    assert [s.origin for s in group] == ["policy", "policy", "demonstration", "other", "other"]
    assert [s.reward for s in group] == [0.5, 0.5, 0.5, 0.5, None] and group[4].failure == "no such digit"
    assert all(s.prompt.recorded == () for s in group), "samples do not repeat what joins the group"


class Short(Duel):
    """Each of the two sides has one turn."""

    async def step(self, reply):
        if self.player:
            return None
        self.player = 1
        return [{"role": "user", "content": reply.message["content"]}]

    def turn_scores(self, player):
        return []


def test_siblings_are_compared_side_by_side_without_those_that_failed():
    """The reply of one second side has no reward."""

    seeds = [[make_seed(11, 4, sibling, turn) for turn in (0, 1)] for sibling in range(3)]
    said = [[f"{50 + seed % 40}" for seed in pair] for pair in seeds]

    async def body() -> Group:
        rewards = Rewards(compares=True, fails=said[1][1])
        worker = a_worker(Digits(), rewards, Short, weights={"n": 0.0, "place": 1.0})
        group = await worker.generate_group(4, PROMPT, 3)
        assert group is not None
        assert rewards.asked[6:] == [[one[0] for one in said], [said[0][1], said[2][1]]]
        return group

    group = run_in_virtual_time(body())
    assert [(s.player, s.reward, s.reward_parts.get("of")) for s in group] == [
        *((0, 0.0, 3.0), (1, 0.0, 2.0)),
        *((0, 1.0, 3.0), (1, None, None)),
        *((0, 2.0, 3.0), (1, 1.0, 2.0)),
    ]
    assert [s.counts.get("judge/calls", 0.0) for s in group] == [11.0, 11.0, 11.0, 0.0, 11.0, 11.0]


ROUTES = np.zeros((3, 1, 1), dtype=np.uint8)


def test_an_evaluation_has_the_second_reward_and_no_routes():
    shown: list[Any] = []

    async def add(messages: list[Message], sample: Any) -> Any:
        await asyncio.sleep(3.0)
        shown.append(messages[-1]["content"])
        return replace(sample, counts={"second/n": 4.0})

    async def body() -> None:
        second: Any = SimpleNamespace(add=add)
        worker = a_worker(Digits(routes=ROUTES), Rewards(), rollout={"router_replay": "watch"}, second=second)
        trained = await worker.generate_group(0, PROMPT, 2) or []
        assert [s.routes is not None for s in trained] == [True, True] and shown == []
        held_out = await worker.generate_group(-1, PROMPT, 2) or []
        assert [(s.routes, s.counts) for s in held_out] == [(None, {"second/n": 4.0})] * 2
        assert shown == [f"{s.token_ids[-1]}" for s in held_out]
        worker.second = None
        assert [s.routes for s in await worker.generate_group(-1, PROMPT, 2) or []] == [None, None]

    run_in_virtual_time(body())


@pytest.mark.parametrize(
    ("rollout", "more", "error", "said"),
    [
        ({}, {}, None, ""),
        ({"top_p": 0.9}, {}, RunStopped, "the engine (rollout.engine) returned no kept sets, and rollout.top_p, "),
        ({"router_replay": "replay"}, {}, RunStopped, "the engine (rollout.engine) returned no routes, and rollout."),
        ({"max_new_tokens": 1}, {"token_ids": [3, 4]}, RunStopped, "the engine (rollout.engine) returned 2 tokens "),
        ({}, {"max_prompt_tokens": 1}, UserError, "data.max_prompt_tokens=1: the prompt p has 2 tokens with what the "),
        ({}, {"stops": ["3"]}, RunStopped, "the engine went on sampling after a stop string (rollout.stop): correct "),
    ],
)
@pytest.mark.parametrize("env", [SingleTurn, Tool])
def test_the_limits_of_a_recipe_hold_in_every_episode(env, rollout, more, error, said):
    class Letters(Words):
        stop_token_ids = (2,)
        written_ids = frozenset(range(99))

    ids = more.get("token_ids", [3, 4] if "stops" in more else [5])
    n = {"token_ids": ids, "logp": [-0.5] * len(ids), "versions": [0] * len(ids)}
    given: dict[str, Any] = {"max_prompt_tokens": more.get("max_prompt_tokens", 2)}
    if "stops" in more:
        given["stops"] = Stops(Letters(), more["stops"], [])  # type: ignore[arg-type]
    worker = a_worker(Digits(**n), Rewards(), env, rollout, **given)

    def make() -> Any:
        return run_in_virtual_time(worker.generate_group(4, PROMPT, 2))

    if error is None:
        assert [s.token_ids.tolist() for s in make()] == [[1, 2, 5]] * 2
    else:
        assert tell(make, error).startswith(said)


def test_replies_are_read_by_the_parser_and_there_are_so_many_at_most():
    class Upper(PlainParser):
        def parse(self, ids, text, tools):
            return replace(
                super().parse(ids, text, tools), message={"role": "assistant", "content": "3 from the parser"}
            )

    class Always(Tool):
        def counts(self):
            return {"seen": 1.0}

    async def body() -> None:
        rewards = Rewards()
        engine = Digits()
        worker = a_worker(engine, rewards, Always, parser=Upper())
        [sample] = await worker.generate_group(4, PROMPT, 1) or []
        assert rewards.asked == [["3 from the parser", "9 9"] * 2 + ["3 from the parser"]]
        assert sample.stop == "turns" and sample.counts == {"turns": 3.0, "seen": 1.0, "judge/calls": 1.0}
        assert [one["max"] for one in engine.asked] == [20, 17, 14]
        assert [one["seed"] for one in engine.asked] == [make_seed(11, 4, 0, turn) for turn in range(3)]

    run_in_virtual_time(body())


def test_the_seconds_of_an_engine_are_those_of_its_activities(monkeypatch):
    class Pondering(Tool):
        async def step(self, reply):
            await asyncio.sleep(3.0)
            return None

    async def body() -> dict[str, float]:
        now = asyncio.get_running_loop().time
        monkeypatch.setattr("core.timing.clock.time", SimpleNamespace(perf_counter=now))
        worker = a_worker(Digits(), Rewards(compares=True), Pondering)
        await worker.generate_group(4, PROMPT, 2)
        await worker.sleep()
        await worker.wake("weights")
        assert worker.engine.notes == ["sleep", "wake weights"]  # type: ignore[attr-defined]
        seconds = worker.timer.read_seconds()
        assert sum(seconds.values()) == now()
        return {name: spent for name, spent in seconds.items() if spent}

    # replies, steps, rewards of each and of both, sleeping and waking
    assert run_in_virtual_time(body()) == {
        "generate": 5.0,
        "environment": 3.0,
        "reward": 4.0,
        "sleep": 1.0,
        "wake": 7.0,
    }


def test_an_engine_sleeps_when_its_groups_are_done():
    async def body() -> None:
        engine = Digits()
        worker = a_worker(engine, Rewards())
        groups = [asyncio.create_task(worker.generate_group(n, PROMPT, 1)) for n in range(2)]
        await asyncio.sleep(1.0)
        assert len(worker.groups) == 2
        await worker.sleep()
        assert engine.notes == ["sleep"] and asyncio.get_running_loop().time() == 8.0 and worker.groups == []
        assert all(group.done() for group in groups)
        await worker.start_trace(True, False)
        assert engine.notes[1:] == [("start", True, False)] and await worker.stop_trace(Path("a")) == ["a.json"]

    run_in_virtual_time(body())


def test_whatever_a_worker_owns_is_closed_and_the_engine_last():
    notes: list[str] = []

    def part(name: str) -> Any:
        async def later() -> None:
            notes.append(name)

        def start() -> Any:
            return later()

        return SimpleNamespace(close=later, start=start)

    def closing(name: str) -> Callable[[], None]:
        return lambda: notes.append(name)

    async def body() -> None:
        rewards, engine = Rewards(fast=True), Digits()
        second: Any = SimpleNamespace(rewards=SimpleNamespace(close=closing("second")))
        worker = a_worker(engine, rewards, judge=part("judge"), second=second, opponent=part("opponent"))
        worker.agents, engine.notes = part("agents"), notes
        rewards.close = closing("rewards")  # type: ignore[method-assign]
        await worker.close()
        assert notes == ["agents", "rewards", "second", "judge", "opponent", "engine"]
        bare = a_worker(engine, rewards)
        await bare.close()
        assert notes[6:] == ["rewards", "engine"]
        judging = a_worker(Digits(), Rewards(), judge=part("started"))
        await judging.generate_group(4, PROMPT, 1)
        assert notes[8:] == ["started"]

    run_in_virtual_time(body())


def test_an_opponent_plays_the_other_side_of_each_group():
    async def body() -> None:
        policy, frozen = Digits(token_ids=[5]), Digits(token_ids=[6])
        worker = a_worker(policy, Rewards(), Short, opponent=OpponentSlot(frozen, version=8), weights={"n": 1.0})
        for ticket in (4, 5):
            policy.asked, frozen.asked = [], []
            group = await worker.generate_group(ticket, PROMPT, 2) or []
            found = [(s.player, s.failure, s.counts.get("game/opponent_version")) for s in group]
            assert found == [(ticket - 4, "", 8.0)] * 2
            first, second = (policy, frozen) if ticket == 4 else (frozen, policy)
            assert [one["ids"] for one in first.asked] == [[1, 2, 7]] * 2
            assert [one["ids"] for one in second.asked] == [[1, 2, 5 if ticket == 4 else 6]] * 2

    run_in_virtual_time(body())
