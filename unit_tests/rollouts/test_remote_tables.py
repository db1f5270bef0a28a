"""Hosts of agents in tables: what an episode gets of each answer, and which host plays the next episode."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, web

from core.errors import UserError
from core.timing.deadlines import AGENT_END_TIMEOUT_S
from rollouts.agents import host as hosting
from rollouts.agents import remote
from rollouts.agents.remote import RemoteAgents
from rollouts.agents.results import AgentResult
from rollouts.agents.task import AgentPlan, Task
from rollouts.output import KEPT_OF_LOG
from unit_tests.helpers.web_server import serve

TASK = Task(base_url="http://127.0.0.1:9/v1", api_key="k", model="policy", messages=[])


class Host:
    """Host that answers each question for an episode by the next of some answers, and the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.keys: list[str | None] = []
        self.began: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.full = 0
        """Times that it has no place."""
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def begin(self, http: web.Request) -> web.Response:
        if self.full:
            self.full -= 1
            return web.Response(status=503)
        self.keys.append(http.headers.get("Authorization"))
        self.began.append(await http.json())
        return web.json_response({})

    async def wait(self, http: web.Request) -> web.Response:
        self.asked.append(http.match_info["id"])
        await self.goes_on.wait()
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.Response(status=found) if isinstance(found, int) else web.json_response(found)

    async def end(self, http: web.Request) -> web.Response:
        self.ended.append(http.match_info["id"])
        return web.json_response({})

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        app = web.Application()
        app.router.add_post("/episodes", self.begin)
        app.router.add_get("/episodes/{id}", self.wait)
        app.router.add_delete("/episodes/{id}", self.end)
        async with serve(app) as address:
            try:
                yield address
            finally:
                self.goes_on.set()


SOLVED = {"parts": {"solved": 1}}


@pytest.mark.parametrize(
    ("answer", "result", "log"),
    [
        (SOLVED, {"parts": {"solved": 1.0}}, b""),
        (SOLVED | {"timed_out": True, "log": "said"}, {"parts": {"solved": 1.0}, "timed_out": True}, b"said"),
        (SOLVED | {"timed_out": "no"}, {"parts": {"solved": 1.0}}, b""),
        ({"failure": "no box"}, {"failure": "no box"}, b""),
        ({"failure": f"the key feynrl-{'k' * 43}"}, {"failure": "the key ***"}, b""),
        # the end of a log is kept, and half of a character is no text
        (SOLVED | {"log": "x" * KEPT_OF_LOG + "end"}, {"parts": {"solved": 1.0}}, b"x" * (KEPT_OF_LOG - 3) + b"end"),
        (SOLVED | {"log": "half \ud800"}, {"parts": {"solved": 1.0}}, b"half \\ud800"),
    ],
    ids=["numbers", "deadline", "no deadline", "failure", "key", "long log", "half of a character"],
)
def test_what_a_host_answers_is_the_result(answer, result, log):
    async def run() -> None:
        host, found = Host(202, 202, answer), bytearray()
        async with host.serving() as address:
            agents = RemoteAgents(AgentPlan(address=(address,), key="secret"))
            played = await agents.run(TASK, timeout_s=300.0, log=found)
            await agents.close()
        assert played == AgentResult(**result, waited_s=played.waited_s) and 0 < played.waited_s < 300
        assert found == log and host.keys == ["Bearer secret"]
        [begun] = host.began
        assert host.asked == [begun["id"]] * 3 and host.ended == [begun["id"]]
        assert (begun["task"]["api_key"], begun["task"]["model"]) == ("k", "policy") and 0 < begun["timeout_s"] <= 300

    asyncio.run(run())


def test_without_a_key_none_is_sent():
    async def run() -> None:
        host = Host(SOLVED)
        async with host.serving() as address:
            agents = RemoteAgents(AgentPlan(address=(address,)))
            await agents.run(TASK, timeout_s=300.0, log=bytearray())
            await agents.close()
        assert host.keys == [None]

    asyncio.run(run())


def test_the_least_busy_host_plays_the_next_episode():
    async def run() -> None:
        hosts = [Host(SOLVED) for _ in range(3)]
        for host in hosts:
            host.goes_on.clear()
        async with hosts[0].serving() as one, hosts[1].serving() as two, hosts[2].serving() as three:
            agents = RemoteAgents(AgentPlan(address=(one, two, three)))

            def play() -> asyncio.Task[AgentResult]:
                return asyncio.create_task(agents.run(TASK, timeout_s=300.0, log=bytearray()))

            playing = [play() for _ in range(6)]
            while sum(len(host.asked) for host in hosts) < 6:
                await asyncio.sleep(0)
            assert [len(host.began) for host in hosts] == [2, 2, 2]
            # the second has ended both of its episodes, and gets the next two
            hosts[1].goes_on.set()
            while len(hosts[1].ended) < 2:
                await asyncio.sleep(0)
            playing += [play(), play()]
            while sum(len(host.began) for host in hosts) < 8:
                await asyncio.sleep(0)
            assert [len(host.began) for host in hosts] == [2, 4, 2]
            for host in hosts:
                host.goes_on.set()
            await asyncio.gather(*playing)
            await agents.close()
        for host in hosts:
            assert Counter(host.ended) == Counter(begun["id"] for begun in host.began)

    asyncio.run(run())


def test_more_episodes_than_a_client_has_connections_play_at_once():
    """aiohttp's own client has 100, and each episode waits in a request."""

    async def run() -> None:
        host = Host(SOLVED)
        host.goes_on.clear()
        async with host.serving() as address, asyncio.timeout(10):
            agents = RemoteAgents(AgentPlan(address=(address,)))
            playing = [asyncio.create_task(agents.run(TASK, timeout_s=300.0, log=bytearray())) for _ in range(101)]
            while len(host.asked) < 101:
                await asyncio.sleep(0.01)
            host.goes_on.set()
            await asyncio.gather(*playing)
            await agents.close()

    asyncio.run(run())


def test_a_full_host_is_asked_again_after_twice_the_time_up_to_a_bound(monkeypatch):
    waited: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waited.extend([seconds] if seconds else [])
        await sleep(0)

    async def run() -> None:
        host = Host(SOLVED)
        host.full = 8
        async with host.serving() as address:
            agents = RemoteAgents(AgentPlan(address=(address,)))
            with monkeypatch.context() as patched:
                patched.setattr(remote.asyncio, "sleep", note)
                played = await agents.run(TASK, timeout_s=300.0, log=bytearray())
            await agents.close()
        assert played.parts == {"solved": 1.0} and host.full == 0

    asyncio.run(run())
    assert waited == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_a_host_that_was_lost_gets_no_episode_while_there_is_another():
    async def run() -> None:
        bad, good = Host(500), Host(SOLVED)
        async with bad.serving() as one, good.serving() as two:
            agents = RemoteAgents(AgentPlan(address=(one, two)))
            lost = await agents.run(TASK, timeout_s=300.0, log=bytearray())
            why = f"rollout.agent.address: {one} answers the question for an episode by HTTP 500 and None"
            assert lost == AgentResult(failure=why, was_lost=True)
            for _ in range(3):
                assert (await agents.run(TASK, timeout_s=300.0, log=bytearray())).parts == {"solved": 1.0}
            await agents.close()
            assert (len(bad.began), len(good.began)) == (1, 3)
            alone = RemoteAgents(AgentPlan(address=(one,)))
            for _ in range(2):
                assert (await alone.run(TASK, timeout_s=300.0, log=bytearray())).was_lost
            await alone.close()
            assert len(bad.began) == 3, "there is no other"

    asyncio.run(run())


def test_players_that_were_closed_leave_no_connection():
    """Or aiohttp would log an unclosed session, and the connection, at the end of the run."""
    logged: list[str] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        async with Host(SOLVED).serving() as address:
            agents = RemoteAgents(AgentPlan(address=(address,)))
            await agents.close()  # no episode has been played
            await agents.run(TASK, timeout_s=300.0, log=bytearray())
            await agents.close()
            del agents
            gc.collect()

    asyncio.run(run())
    assert logged == []


def test_an_episode_may_be_shorter_than_the_wait_for_its_end():
    async def run() -> None:
        host = Host(202, SOLVED)
        async with host.serving() as address:
            agents = RemoteAgents(AgentPlan(address=(address,)))
            assert AGENT_END_TIMEOUT_S > 9
            assert (await agents.run(TASK, timeout_s=9.0, log=bytearray())).parts == {"solved": 1.0}
            await agents.close()

    asyncio.run(run())


def test_a_host_tells_of_a_missing_episode_and_of_a_wrong_agent():
    async def fail(*_: Any, **__: Any) -> None:
        raise UserError("rollout.agent.file: there is no a.py")

    async def close() -> None: ...

    async def run() -> None:
        agents: Any = SimpleNamespace(run=fail, close=close)
        given = {"id": "1", "timeout_s": 9.0, "task": {"base_url": "http://h", "api_key": "k", "model": "m"}}
        given["task"]["messages"] = []
        host = hosting.AgentHost(agents, most=1, key="")
        async with serve(host.make_app()) as address, ClientSession(address) as client:
            for name, status, told in (
                ("1", 500, "rollout.agent.file: there is no a.py"),
                ("2", 404, "404: Not Found"),
            ):
                async with client.post("/episodes", json=given) as begun:
                    assert (begun.status, await begun.json()) == (200, {})
                async with client.get(f"/episodes/{name}") as answer:
                    assert (answer.status, await answer.text()) == (status, told)
            assert [*host.episodes] == ["1"], "the second start was one that had begun"

    asyncio.run(run())


def test_a_host_ends_what_nobody_has_asked_for_lately_and_in_the_end_all(monkeypatch):
    monkeypatch.setattr(hosting, "FORGET_S", 2.0)
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    async def run() -> None:
        agents: Any = SimpleNamespace(close=close)
        host, now = hosting.AgentHost(agents, most=9, key=""), time.monotonic()
        playing = {name: asyncio.ensure_future(asyncio.sleep(600)) for name in ("old", "new")}
        for name, asked_at in (("old", now - 60.0), ("new", now + 1.5)):
            episode: Any = playing[name]
            host.episodes[name] = hosting.Hosted(playing=episode, log=bytearray(), asked_at=asked_at)
        runner = web.AppRunner(host.make_app())
        await runner.setup()
        while not playing["old"].done():
            await asyncio.sleep(0)
        for _ in range(9):  # turns of the event loop in which others would be ended, too
            await asyncio.sleep(0)
        assert [*host.episodes] == ["new"] and playing["old"].cancelled() and not playing["new"].done()
        await runner.cleanup()
        assert host.episodes == {} and playing["new"].cancelled() and closed == [True]

    asyncio.run(run())
