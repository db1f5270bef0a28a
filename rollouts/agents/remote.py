"""Episodes on other machines, over HTTP. rollouts/agents/host.py serves them there.

    POST   ADDRESS/episodes        {"id", "task", "timeout_s"} starts an episode; again, it does nothing; 503: full
    GET    ADDRESS/episodes/ID     waits a while; 202: it is running; 200: {"parts", "failure", "timed_out", "log"}
    DELETE ADDRESS/episodes/ID     ends it

An episode whose host is gone, does not know it, or answers anything else has failed. Its result says that the host was
lost, so that it may be played again elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp

from core.errors import UserError, name_error, shorten
from core.text.json_text import decode_json
from core.timing.deadlines import AGENT_END_TIMEOUT_S, AGENT_HOST_POLL_S
from rollouts.agents.processes import AgentProcesses, write_task
from rollouts.agents.results import AgentResult, hide_keys, read_fields
from rollouts.agents.task import HOST_KEY, AgentPlan, Task
from rollouts.output import KEPT_OF_LOG

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
"""Seconds between two requests for a place: doubled each time, up to a bound."""
AVOIDED_S = 6 * AGENT_END_TIMEOUT_S
"""Seconds for which a host that was lost gets no episode, if there are others."""


class RemoteAgents:
    """Player of episodes on the hosts of `rollout.agent.address`."""

    def __init__(self, plan: AgentPlan):
        self.plan = plan
        self._in_flight = dict.fromkeys(plan.address, 0)
        self._lost_at: dict[str, float] = {}
        self._http: aiohttp.ClientSession | None = None

    async def run(self, task: Task, *, timeout_s: float, log: bytearray) -> AgentResult:
        """Run an agent on the least busy host. It is ended after `timeout_s` seconds, or on cancellation.

        The wait for a place counts, because the deadline of the group does not wait.
        log: receives the end of the agent's output.
        """
        given = json.loads(write_task(task))
        body: dict[str, Any] = {"id": secrets.token_hex(16), "task": given}
        begin = asyncio.get_running_loop().time()
        host, until = "", begin + timeout_s
        try:
            async with asyncio.timeout_at(until):
                host = await self._begin(body, until)
            waited_s = asyncio.get_running_loop().time() - begin
            # the host ends an agent that is late, which takes a while
            async with asyncio.timeout_at(until + AGENT_END_TIMEOUT_S):
                found = replace(await self._wait(host, body["id"], log), waited_s=waited_s)
        except TimeoutError:
            # without a place until the deadline, which is no fault of the policy
            found = AgentResult(failure=f"no host of rollout.agent.address had a place within {timeout_s:g} s")
            if host:
                found = self._lose(host, "does not end the episode at its deadline")
        except _HostFailed as error:
            found = self._lose(error.host, str(error))
        finally:
            if host:
                self._in_flight[host] -= 1
                await self._end(host, body["id"])
        return replace(found, failure=shorten(hide_keys(found.failure)))

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

    async def _begin(self, body: dict[str, Any], until: float) -> str:
        """Start an episode with the time that is left. Return the host, once one has a place.

        until: deadline, on the clock of the event loop. Raises TimeoutError after it.
        """
        wait_s = FIRST_WAIT_S
        while (left_s := until - asyncio.get_running_loop().time()) > 0:
            host = self._choose()
            # before the request, so that the episodes of a group spread
            self._in_flight[host] += 1
            try:
                status, _ = await self._ask("POST", host, "/episodes", {**body, "timeout_s": left_s})
                if status == 401:
                    raise UserError(
                        f"rollout.agent.address: {host} does not accept the key: set {HOST_KEY} to one value there and "
                        "on this machine"
                    )
                if status not in (200, 503):
                    raise _HostFailed(host, f"answers the start of an episode by HTTP {status}")
            except BaseException:
                self._in_flight[host] -= 1
                # it may have begun there
                await self._end(host, body["id"])
                raise
            if status == 200:
                return host
            self._in_flight[host] -= 1
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise TimeoutError

    async def _wait(self, host: str, episode: str, log: bytearray) -> AgentResult:
        while True:
            status, found = await self._ask("GET", host, f"/episodes/{episode}")
            if status == 202:
                continue
            if status != 200 or not isinstance(found, dict):
                raise _HostFailed(host, f"answers the question for an episode by HTTP {status} and {found!r:.80}")
            log += str(found.get("log", "")).encode(errors="backslashreplace")[-KEPT_OF_LOG:]
            return replace(read_fields(found), timed_out=found.get("timed_out") is True)

    async def _ask(self, method: str, host: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON of an answer. Raises _HostFailed if there is none."""
        if self._http is None or self._http.closed:
            key = self.plan.key
            limit = aiohttp.ClientTimeout(total=AGENT_HOST_POLL_S + AGENT_END_TIMEOUT_S)
            # a connection per episode: each waits in a request for most of its time
            self._http = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=limit,
                connector=aiohttp.TCPConnector(limit=0),
            )
        try:
            async with self._http.request(method, host + path, json=body) as answer:
                text = await answer.text()
                return answer.status, decode_json(text) if answer.status == 200 and text else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise _HostFailed(host, f"cannot be reached: {name_error(error)}") from error

    async def _end(self, host: str, episode: str) -> None:
        with suppress(_HostFailed):  # an episode that nobody asks for is ended by the host itself
            await self._ask("DELETE", host, f"/episodes/{episode}")

    def _choose(self) -> str:
        """Return the host with the fewest episodes, of those that were not lost lately."""
        lately = time.monotonic() - AVOIDED_S
        there = [host for host in self._in_flight if self._lost_at.get(host, lately) <= lately]
        return min(there or self._in_flight, key=self._in_flight.__getitem__)

    def _lose(self, host: str, why: str) -> AgentResult:
        self._lost_at[host] = time.monotonic()
        return AgentResult(failure=f"rollout.agent.address: {host} {why}", was_lost=True)


def start_agents(plan: AgentPlan) -> AgentProcesses | RemoteAgents:
    """Return the player of a plan's episodes: processes of this machine, which begin to start, or other machines."""
    return RemoteAgents(plan) if plan.address else AgentProcesses(plan)


class _HostFailed(Exception):
    """Host that is gone, or answers anything else than the protocol."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(why)
        self.host = host
