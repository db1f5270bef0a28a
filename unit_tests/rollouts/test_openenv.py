"""OpenEnv's wire, spoken by a server of these lines: capacity, death in mid-episode, and every kind of wrong answer."""

from __future__ import annotations

import asyncio
import gc
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import WSCloseCode

from core.errors import UserError
from core.types.samples import Prompt
from rollouts.engines.base import Completion
from rollouts.envs import openenv
from rollouts.envs.openenv import (
    CALL,
    BrokenServer,
    NoSession,
    OpenEnv,
    describe_tool,
    is_text,
    read_answer,
    read_observation,
)
from rollouts.envs.openenv import read_url as read_address
from rollouts.episode import run_episode
from rollouts.registry import load_env_class, resolve_env
from rollouts.turns import EpisodeRules
from unit_tests.helpers.episodes import Words, calls_of, said
from unit_tests.helpers.openenv_server import Server
from unit_tests.helpers.sentences import tell

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


def test_a_session_whose_server_has_died_is_closed_without_an_error():
    """Nobody reads when the connection breaks, so the client learns of it as it says goodbye."""

    async def run():
        async with (server := Server()).running() as url:
            env = OpenEnv(Prompt(id="row", messages=[], extra={"env_url": url}))
            await env.open()
            [dying] = server.sockets
            dying.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            while server.sessions:
                await asyncio.sleep(0)
            await env.close()
            assert env._socket is None and env._http.closed

    asyncio.run(run())


SAID = '{"type": "observation", "data": '
WRONG = {
    "garbage": (SAID, 'answered \'{"type": "observation", "data": \', where a JSON object with type and data'),
    "no observation": (SAID + '{"reward": 1}}', "which has no observation"),
    "no number": (SAID + '{"observation": {}, "reward": "much"}}', "the reward is 'much', where a number is expected"),
    "not finite": (SAID + '{"observation": {}, "reward": NaN}}', "the reward is nan, where a number is expected"),
    "too large": (SAID + f'{{"observation": {{}}, "reward": {10**400}}}}}', "the reward is 1000"),
    "deep": ("[" * 5000, f"answered {'[' * 5000!r:.80}, where a JSON object with type and data is expected"),
    "half": (SAID + '{"observation": {"text": "a \\ud800"}, "reward": 1}}', "a text that holds half of a character"),
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


HALF = '{"action": {"properties": {"a": {"type": "string", "title": "\\udc00"}, "b": {"type": "string"}}}}'


@pytest.mark.parametrize("schema", ["what?", "[]", '{"action": {}}', HALF])
def test_a_server_of_something_else_is_named(schema):
    failure = asyncio.run(play_one(Server(schema=schema))).sample.failure
    told = "has a text that holds half" if schema == HALF else "is it a server of OpenEnv?"
    assert "/schema cannot be read" in failure or told in failure


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


def row(**extra: Any) -> Prompt:
    return Prompt(id="r", messages=[], extra=extra)


TEXT = {"type": "string"}


def test_an_answer_of_a_server_is_its_data_or_a_sentence():
    good = '{"type": "observation", "data": {"observation": {}, "reward": 1}}'
    assert read_answer(good, "u") == {"observation": {}, "reward": 1}
    with pytest.raises(NoSession):
        read_answer('{"type": "error", "data": {"code": "CAPACITY_REACHED"}}', "u")
    no_object = ", where a JSON object with type and data is expected"
    for text, sentence in {
        "what?": f"u answered 'what?'{no_object}",
        "[1]": f"u answered '[1]'{no_object}",
        '{"data": 3}': f"u answered '{{\"data\": 3}}'{no_object}",
        "x" * 99: f"u answered '{'x' * 79}{no_object}",
        '{"type": "error", "data": {"message": "no", "code": "E"}}': "u answered with an error: no (E)",
        '{"type": "x", "data": {"observation": 3}}': 'u answered \'{"type": "x", "data": {"observation": 3}}\', '
        "which has no observation",
    }.items():
        assert tell(lambda text=text: read_answer(text, "u"), BrokenServer) == sentence


def test_an_observation_is_its_messages_or_its_text_or_json():
    message = {"role": "system", "content": "a"}
    for observation, found in (
        ({"messages": [message | {"name": "b"}, message], "text": "t"}, [message, message]),
        ({"messages": [], "text": "t", "prompt": "p"}, [{"role": "user", "content": "t"}]),
        ({"messages": [message, {"role": "user"}], "text": 3, "prompt": "p"}, [{"role": "user", "content": "p"}]),
        ({"messages": [{"role": 1, "content": "a"}]}, None),
        ({"messages": message, "board": "é"}, None),
        ({"messages": ["user"], "text": None}, None),
    ):
        as_json = openenv.json.dumps(observation, ensure_ascii=False)
        assert read_observation({"observation": observation}) == (found or [{"role": "user", "content": as_json}])
    assert "é" in read_observation({"observation": {"board": "é"}})[0]["content"]
    for fields, alone in (({}, False), ({"a": TEXT}, True), ({"a": {}}, False), ({"a": TEXT, "b": TEXT}, False)):
        assert is_text(fields) is alone
    function = {"name": "act", "description": "Act in the environment."}
    function["parameters"] = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}  # type: ignore[assignment]
    assert describe_tool({"a": TEXT}, ["a"]) == {"type": "function", "function": function}
    for url in ("http://h:1/", "https://h//"):
        assert read_address(row(env_url=url)) == url.rstrip("/")
    for wrong in (None, 3, "ws://h"):
        assert tell(lambda wrong=wrong: read_address(row(env_url=wrong))) == (
            "rollout.env=openenv: the row r must have the address of a server in its column env_url "
            f"(http://localhost:8000), found {wrong}"
        )


class Wire:
    """HTTP session and socket of a server: says each answer in turn, and notes what it is told."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.asked, self.addresses, self.closed = list(answers), list[Any](), list[Any](), False
        self.n_closed = 0

    async def ws_connect(self, address: str, *, max_msg_size: int, timeout: Any) -> Wire:
        self.addresses.append((address, max_msg_size, timeout.ws_close))
        return self

    async def send_str(self, text: str) -> None:
        self.asked.append(openenv.json.loads(text))

    async def receive(self) -> Any:
        kind = openenv.aiohttp.WSMsgType.TEXT
        return SimpleNamespace(type=kind, data=openenv.json.dumps(self.answers.pop(0)))

    async def close(self) -> None:
        self.n_closed += 1


def of(data: dict[str, Any], kind: str = "observation") -> dict[str, Any]:
    return {"type": kind, "data": data}


def test_a_full_server_is_asked_again_ever_more_rarely(monkeypatch):
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(openenv.asyncio, "sleep", sleep)
    wire: Any = Wire(*[of({"code": openenv.CAPACITY}, "error")] * 7, of({"observation": {"text": "hi"}}))
    env = OpenEnv(row(env_url="https://http/a/", reset={"seed": 3}))
    assert asyncio.run(env._reset(wire)) == {"observation": {"text": "hi"}}
    assert waited == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0] and wire.n_closed == 7
    assert {*wire.addresses} == {("wss://http/a/ws", 100 * 2**20, openenv.OPENENV_CLOSE_TIMEOUT_S)}
    assert wire.asked == [{"type": "reset", "data": {"seed": 3}}] * 8


def test_rewards_of_a_reply_add_up_and_only_true_ends_the_episode():
    async def play() -> OpenEnv:
        env = OpenEnv(row(env_url="http://h"))
        steps = [{"reward": 2}, {"reward": None, "done": 1}, {}, {"reward": 0.5, "done": True}]
        env._socket = wire = Wire(*(of({"observation": {"text": "t"}} | one) for one in steps))  # type: ignore[assignment]
        told = await env.step(calls_of(("act", {"a": 1}), ("act", {"a": 2})))
        assert told == [{"role": "tool", "content": "t", "tool_call_id": f"call_{n}"} for n in (0, 1)]
        assert await env.step(calls_of()) == [{"role": "user", "content": "Call the tool act to act."}]
        env.field = "move"
        assert await env.step(said("up")) == [{"role": "user", "content": "t"}]
        assert env.scores()["finished"] == 0.0
        assert await env.step(said("down")) is None
        actions = [{"a": 1}, {"a": 2}, {"move": "up"}, {"move": "down"}]
        assert wire.asked == [{"type": "step", "data": action} for action in actions]
        await env.close()
        assert wire.asked[-1] == {"type": "close"} and wire.n_closed == 1
        return env

    env = asyncio.run(play())
    assert env.turn_scores(0) == [{"return": n} for n in (2.0, 0.0, 0.0, 0.5)]
    assert env.scores() == {"return": 2.5, "steps": 4.0, "finished": 1.0}
    env._socket = Wire(of({"observation": {}, "reward": True}))  # type: ignore[assignment]
    expected = "http://h: the reward is True, where a number is expected"
    assert tell(lambda: asyncio.run(env.step(said("up"))), BrokenServer) == expected


def test_an_episode_that_was_never_opened_has_earned_nothing_and_closes():
    env = OpenEnv(row(env_url="http://h"))
    assert env.scores() == {"return": 0.0, "steps": 0.0, "finished": 0.0} and env.turn_scores(0) == []
    asyncio.run(env.close())


def test_a_server_that_does_not_tell_its_schema_in_time_is_told():
    class Silent(Server):
        async def show_schema(self, http):
            await asyncio.sleep(60)

    class Impatient(OpenEnv):
        timeout_s = 0.05

    async def go() -> tuple[str, str]:
        async with Silent().running() as url:
            env = Impatient(row(env_url=url))
            with pytest.raises(BrokenServer) as broken:
                await env.open()
            await env.close()
            return url, str(broken.value)

    url, told = asyncio.run(go())
    assert told == f"{url}schema cannot be read: TimeoutError"


def test_a_closed_episode_leaves_no_connection_open():
    async def go() -> list[Any]:
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["message"]))
        async with Server().running() as url:
            env = OpenEnv(row(env_url=url))
            await env.open()
            await env.close()
            del env
            gc.collect()
        return faults

    assert asyncio.run(go()) == []
