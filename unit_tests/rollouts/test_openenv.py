"""OpenEnv's wire, spoken by a server of these lines: capacity, death in mid-episode, and every kind of wrong answer."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import WSCloseCode

from core.errors import UserError
from core.types.samples import Prompt
from rollouts.engines.base import Completion
from rollouts.envs import openenv
from rollouts.envs.openenv import CALL, OpenEnv, describe_tool
from rollouts.episode import run_episode
from rollouts.registry import load_env_class, resolve_env
from rollouts.turns import EpisodeRules
from unit_tests.helpers.episodes import Words, calls_of
from unit_tests.helpers.openenv_server import Server

MOVE = {"row": {"type": "integer"}, "column": {"type": "integer"}}


class Says:
    """Says 2, then 3."""

    def __init__(self, before=None):
        self.before = before

    async def generate(self, token_ids, *, max_new_tokens, seed):
        if self.before is not None and seed:
            await self.before()
        return Completion(token_ids=[2 + seed], logp=[-0.5], versions=[0], stop="eos")


def play(url, engine=None, **extra):
    prompt = Prompt(id="row", messages=[{"role": "user", "content": "1"}], extra={"env_url": url} | extra)
    rules = EpisodeRules(seed_of_turn=lambda turn: turn, max_new_tokens=50, max_turns=4, timeout_s=60.0)
    return run_episode(engine or Says(), OpenEnv, prompt, Words(), rules)


async def play_one(server, **extra):
    async with server.running() as url:
        [played] = await play(url, **extra)
    assert server.sessions == 0
    return played


def test_sixteen_episodes_wait_for_two_sessions(monkeypatch):
    monkeypatch.setattr(openenv, "LONGEST_WAIT_S", 0.05)

    async def run():
        async with server.running() as url:
            return await asyncio.gather(*(play(url, reset={"seed": i}) for i in range(16)))

    server = Server(capacity=2)
    played = [one for [one] in asyncio.run(run())]
    assert [one.sample.failure for one in played] == [""] * 16 and server.sessions == 0
    assert [one.sample.reward_parts for one in played] == [{"return": 1.25, "steps": 2.0, "finished": 1.0}] * 16
    assert played[0].turn_scores == [{"return": 0.25}, {"return": 1.0}]
    assert [m["content"] for m in played[0].messages] == ["2", "8", "3"]
    assert sorted(given["seed"] for given in server.resets) == [*range(16)] and {"message": "3"} in server.steps
    assert load_env_class(resolve_env("openenv")).__name__ == "OpenEnv"


def test_a_server_that_dies_fails_its_episodes_and_no_other():
    async def run():
        async with Server().running() as good:
            async with (dying := Server()).running() as bad:

                async def kill():
                    for socket in dying.sockets:
                        await socket.close(code=WSCloseCode.GOING_AWAY)

                failing = [play(bad, Says(before=kill)) for _ in range(2)]
                found = await asyncio.gather(*failing, *(play(good) for _ in range(2)))
            return [*found, await play(bad)]

    failures = [one.sample.failure for [one] in asyncio.run(run())]
    assert all("closed the connection" in failure for failure in failures[:2]), failures
    assert failures[2:4] == ["", ""] and "/schema cannot be read" in failures[4]


SAID = '{"type": "observation", "data": '
WRONG = {
    "garbage": (SAID, 'answered \'{"type": "observation", "data": \', where a JSON object with type and data'),
    "no observation": (SAID + '{"reward": 1}}', "which has no observation"),
    "no number": (SAID + '{"observation": {}, "reward": "much"}}', "the reward is 'much', where a number is expected"),
    "not finite": (SAID + '{"observation": {}, "reward": NaN}}', "the reward is nan, where a number is expected"),
    "too large": (SAID + f'{{"observation": {{}}, "reward": {10**400}}}}}', "the reward is 1000"),
    "an error": ('{"type": "error", "data": {"message": "no such piece", "code": "E"}}', "no such piece (E)"),
    "hangs": ("", "no answer to a AT within 0.2 s"),
}

OF_STEPS = ("no number", "not finite", "too large")
"""Faults of a reward, which a reset has not."""


@pytest.mark.parametrize(
    "wrong, at", [(wrong, at) for wrong in WRONG for at in ("step", "reset") if at == "step" or wrong not in OF_STEPS]
)
def test_a_wrong_answer_fails_the_sample_by_a_sentence(wrong, at, monkeypatch):
    monkeypatch.setattr(OpenEnv, "timeout_s", 0.2)
    answer, sentence = WRONG[wrong]
    sample = asyncio.run(play_one(Server(answer=answer, at=at))).sample
    assert sentence.replace("AT", at) in sample.failure and "\n" not in sample.failure and not sample.reward_parts


def test_a_server_that_never_shakes_hands_is_told(monkeypatch):
    monkeypatch.setattr(OpenEnv, "timeout_s", 0.2)
    server = Server()

    async def silent(http):
        await asyncio.sleep(60)

    server.serve = silent
    assert "/ws cannot be reached" in asyncio.run(play_one(server)).sample.failure


@pytest.mark.parametrize("schema", ["what?", "[]", '{"action": {}}'])
def test_a_server_of_something_else_is_named(schema):
    failure = asyncio.run(play_one(Server(schema=schema))).sample.failure
    assert "/schema cannot be read" in failure or "is it a server of OpenEnv?" in failure


def test_an_action_of_several_fields_is_a_tool():
    async def run():
        async with (server := Server(fields=MOVE)).running() as url:
            env = OpenEnv(Prompt(id="row", messages=[], extra={"env_url": url}))
            first = await env.open()
            assert env.tools == [describe_tool(MOVE, ["row", "column"])]
            assert first == [{"role": "user", "content": "7 7"}]
            assert await env.step(calls_of()) == [{"role": "user", "content": CALL}]
            told = await env.step(calls_of(("act", {"row": 1, "column": 2}), ("act", {"row": 1, "column": 1})))
            assert told == [{"role": "tool", "content": "8", "tool_call_id": f"call_{i}"} for i in (0, 1)]
            assert await env.step(calls_of(("act", {"row": 3, "column": 3}))) is None
            await env.close()
            assert env.turn_scores(0) == [{"return": 0.0}, {"return": 0.5}, {"return": 1.0}]
            assert server.steps[0] == {"row": 1, "column": 2} and env.scores()["steps"] == 3

    asyncio.run(run())


def test_a_row_without_an_address_is_refused():
    with pytest.raises(UserError, match=r"^rollout\.env=openenv: the row 1 must have the address .* found None$"):
        OpenEnv(Prompt(id="1", messages=[]))
