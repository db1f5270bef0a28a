"""Episodes on other machines, here servers of this process: what is played, and what a machine may do wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from configs.agent_schema import AgentConfig
from configs.rollout_schema import RolloutConfig
from core.errors import UserError
from rollouts.agents import host as hosting
from rollouts.agents import remote
from rollouts.agents.host import AgentHost
from rollouts.agents.processes import AgentProcesses
from rollouts.agents.task import HOST_KEY, AgentPlan
from rollouts.registry import resolve_agent
from unit_tests.helpers.agents import MARK, find_processes, play, write_agent
from unit_tests.helpers.processes import wait_until
from unit_tests.helpers.scripted_policy import Policy
from unit_tests.helpers.web_server import serve

LAUNCHER = "rollouts.agents.launcher"
ANSWER = """
def run(task):
    said = ask(task, task.messages)
    print("played", task.id, os.environ.get("FEYNRL_AGENT_KEY"))
    return {"solved": float(said["content"] == "Seven.")}
"""


@pytest.fixture(autouse=True)
def _marked(monkeypatch):
    monkeypatch.setenv("TEST_OF_AGENTS", MARK)


@contextmanager
def serving(make: Callable[[], web.Application]) -> Iterator[str]:
    """Serve an application in a thread. Yields its address."""
    loop, found = asyncio.new_event_loop(), list[str]()
    over = asyncio.Event()

    async def run() -> None:
        async with serve(make(), cancels=True) as address:
            found.append(address)
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        wait_until(lambda: found)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def plan_of(*addresses: str) -> AgentPlan:
    return resolve_agent(AgentConfig(address=[*addresses]))


def test_episodes_of_another_machine_are_those_of_this_one(qwen, tmp_path, monkeypatch):
    """With a key that no agent sees, in two places at a time for four episodes, and nothing is left there."""
    monkeypatch.setenv(HOST_KEY, "secret")
    host: list[AgentHost] = []
    agent = write_agent(tmp_path, ANSWER)

    def make() -> web.Application:
        host.append(AgentHost(AgentProcesses(agent), most=2, key="secret"))
        return host[0].make_app()

    policy = Policy(qwen, lambda context: "Seven.")
    with serving(make) as address:
        plan = plan_of(f"{address}/")
        # an engine on another machine of a Ray cluster has not the environment of the driver
        monkeypatch.delenv(HOST_KEY)
        samples = play(plan, policy, size=4)
        monkeypatch.setenv(HOST_KEY, "secret")
        assert "secret" not in repr(plan)
        assert [sample.failure for sample in samples] == [""] * 4
        assert [sample.reward for sample in samples] == [2.0] * 4 and samples[0].log == "played p None"
        wait_until(lambda: not host[0].episodes)
    wait_until(lambda: not find_processes(LAUNCHER))
    local = play(agent, Policy(qwen, lambda context: "Seven."), size=1)
    assert local[0].token_ids.tolist() == samples[0].token_ids.tolist()


class Faulty:
    """Machine that does something wrong."""

    def __init__(self, *, begin=200, wait: Callable[[], web.Response] | None = None, full=0, hangs=False):
        self.begin, self.wait, self.full, self.hangs = begin, wait, full, hangs
        self.began, self.ended = list[str](), set[str]()
        self.given = list[dict[str, Any]]()

    def make_app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/episodes", self._begin)
        app.router.add_get("/episodes/{id}", self._wait)
        app.router.add_delete("/episodes/{id}", self._end)
        return app

    async def _begin(self, http: web.Request) -> web.Response:
        if self.full:
            self.full -= 1
            return web.Response(status=503)
        self.given.append(await http.json())
        self.began.append(self.given[-1]["id"])
        return web.json_response({}, status=self.begin)

    async def _wait(self, http: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(60)
        if self.wait is None:
            http.transport.abort()  # pyright: ignore
            return web.Response()
        return self.wait()

    async def _end(self, http: web.Request) -> web.Response:
        self.ended.add(http.match_info["id"])
        return web.json_response({})


def give(**answer: Any) -> Callable[[], web.Response]:
    return lambda: web.json_response(answer)


FAULTS = {
    # of a machine: (what it does, times that the episode begins, the sentence)
    "death": (dict[str, Any](), 2, "cannot be reached"),
    "garbage": ({"wait": lambda: web.Response(text="what?")}, 2, "cannot be reached: JSONDecodeError"),
    "unknown episode": ({"wait": lambda: web.Response(status=404)}, 2, "by HTTP 404"),
    "wrong schema": ({"wait": give(parts={"solved": "much"})}, 1, "it returned 'solved': 'much'"),
    "failure": ({"wait": give(failure="no box")}, 1, "no box"),
    "refusal": ({"begin": 500}, 2, "answers the start of an episode by HTTP 500"),
    "hang": ({"hangs": True}, 2, "does not end the episode at its deadline"),
    "capacity": ({"full": 999}, 0, "had a place within 0.3 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_machine_that_fails_is_a_failed_sample(qwen, monkeypatch, fault):
    monkeypatch.setattr(remote, "AGENT_END_TIMEOUT_S", 0.2)
    does, times, sentence = FAULTS[fault]
    machine = Faulty(**does)
    seconds = 0.3 if fault in ("hang", "capacity") else 5.0
    with serving(machine.make_app) as address:
        [sample] = play(plan_of(address), Policy(qwen, []), agent_timeout_s=seconds)
    assert sentence in sample.failure and "\n" not in sample.failure and not sample.reward_parts, sample.failure
    assert len(machine.began) == times and {*machine.began} <= machine.ended
    # the agent of a lost machine may still run there, and must not reach the episode that took its place
    assert len({one["task"]["base_url"] for one in machine.given}) == times
    assert len({one["task"]["api_key"] for one in machine.given}) == times


def test_an_episode_waits_for_a_place(qwen):
    machine = Faulty(full=3, wait=give(parts={"solved": 1}, log="late"))
    with serving(machine.make_app) as address:
        [sample] = play(plan_of(address), Policy(qwen, []))
    # nothing was asked of the policy
    assert "without a reply" in sample.failure and sample.log == "late" and len(machine.began) == 1
    # 0.05, 0.1 and 0.2 s for a place, which are no time for the agent
    assert machine.given[0]["timeout_s"] <= 50 - 0.35


def test_a_lost_episode_begins_again_elsewhere_unless_it_has_sampled(qwen, tmp_path):
    agent = write_agent(tmp_path, ANSWER)
    dead = "http://127.0.0.1:9"
    with serving(lambda: AgentHost(AgentProcesses(agent), most=9, key="").make_app()) as good:
        [sample] = play(plan_of(dead, good), Policy(qwen, ["Seven."]))
        assert not sample.failure and sample.reward == 2.0

        class Late(Faulty):
            """Asks the policy, and dies."""

            async def _begin(self, http: web.Request) -> web.Response:
                from unit_tests.helpers.agents import ASK

                task = (await http.json())["task"]
                space: dict[str, Any] = {}
                exec(ASK, space)
                await asyncio.to_thread(space["ask"], type("Given", (), task), task["messages"])
                return await super()._begin(http)

        lost = Late()
        with serving(lost.make_app) as address:
            [sample] = play(plan_of(address, good), Policy(qwen, ["Six."]))
        assert "cannot be reached" in sample.failure and len(lost.began) == 1


def test_an_episode_that_nobody_asks_for_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(hosting, "FORGET_S", 0.2)
    agent = write_agent(tmp_path, "def run(task):\n    time.sleep(600)\n")
    host: list[AgentHost] = []

    def make() -> web.Application:
        host.append(AgentHost(AgentProcesses(agent), most=9, key=""))
        return host[0].make_app()

    task = {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "model": "m", "messages": []}

    async def begin(address: str) -> None:
        import aiohttp

        async with aiohttp.ClientSession() as http:
            good = {"id": "1", "task": task, "timeout_s": 99}
            wrong = (
                {"id": ["1"]},
                {"timeout_s": float("nan")},
                {"timeout_s": 10**400},
                {"task": None},
                {"task": task | {"base_url": 1}},
            )
            for body, status in ((good, 200), ({"id": "2"}, 400), *((good | one, 400) for one in wrong)):
                async with http.post(f"{address}/episodes", json=body) as answer:
                    assert answer.status == status
            async with http.post(f"{address}/episodes", data="[" * 5000) as answer:
                assert answer.status == 400 and "nested too deeply" in await answer.text()

    with serving(make) as address:
        asyncio.run(begin(address))
        wait_until(lambda: not host[0].episodes)
    wait_until(lambda: not find_processes(LAUNCHER))


def test_a_wrong_key_stops_the_run(qwen, tmp_path):
    agent = write_agent(tmp_path, ANSWER)
    with (
        serving(lambda: AgentHost(AgentProcesses(agent), most=9, key="secret").make_app()) as address,
        pytest.raises(UserError, match="does not accept the key: set FEYNRL_AGENT_KEY"),
    ):
        play(plan_of(address), Policy(qwen, []))


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"agent": {"address": ["example.org"]}}, "must be like http://10.0.0.2:9000"),
        ({"agent": {"address": ["https://ann:hunter2@a"]}}, "an address must hold no user or password"),
        ({"agent": {"address": ["https://a:70000"]}}, "Port out of range"),
        ({"agent": {"address": ["http://a:1"], "command": ["ls"]}}, "set one of file, command and address"),
        ({"agent": {"address": ["http://a:1"], "serve": True}}, "serve has no effect with address"),
        ({"agent": {"address": ["https://a:1"]}}, "another machine, which does not reach 127.0.0.1: set gateway"),
        (
            {"agent": {"address": ["http://a:1"]}, "gateway": {"port": 5, "url": "https://b"}},
            "agent.address=http://a:1 is plain HTTP to another machine",
        ),
    ],
)
def test_addresses_that_lead_nowhere_or_are_open_are_refused(keys, words):
    with pytest.raises(ValidationError) as refusal:
        RolloutConfig(**keys)
    assert words in str(refusal.value)


def test_a_host_that_anybody_could_use_is_refused(monkeypatch):
    for key, words, sentence in (
        ("", ["--listen", "0.0.0.0", "--", "ls"], "lets anybody start episodes: set FEYNRL_AGENT_KEY"),
        ("k", ["--listen", "0.0.0.0", "--", "ls"], "is plain HTTP on an address that other machines reach"),
        ("k", ["--insecure", "--", "ls"], "--insecure has no effect"),
        ("", ["--listen", "localhost", "--", "ls"], "must be an IP address"),
        ("", ["--port", "70000", "--", "ls"], "--port 70000 must be from 0 to 65535"),
        ("", ["--most", "0", "--", "ls"], "--most 0 must be at least 1"),
        ("", [], "give --file or a command, and not both"),
    ):
        monkeypatch.setenv(HOST_KEY, key)
        with pytest.raises(UserError, match=sentence):
            hosting.main(words)
