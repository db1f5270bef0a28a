"""Process of an agent that plays all episodes of an engine, many at a time.

Messages are lines of JSON. The process reads {"id": number, "task": task} and {"cancel": number} from standard
input. It writes {"id", "parts"} or {"id", "failure"} to file descriptor 3 when an episode has ended, also after a
cancel, and may write {"id", "so_far"} before. One that does not obey a cancel, writes anything else or dies takes all
episodes with it, and the next episode starts another process.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from itertools import count

from core.tasks import start_task
from core.timing.deadlines import AGENT_CANCEL_TIMEOUT_S, ERROR_GRACE_S
from core.timing.progress import say
from rollouts.agents.launching import NO_START, AgentProcess, LauncherClient, name_clients
from rollouts.agents.results import AgentResult, describe_exit, read_message
from rollouts.output import KEPT_OF_LOG, Output


class ServedAgent:
    """Owner of the process that plays the episodes. The first of them starts it."""

    def __init__(self, launcher: LauncherClient):
        self._launcher = launcher
        self._server: _Server | None = None
        self._starting = asyncio.Lock()
        self._numbers = count()

    async def run(self, given: str, environment: dict[str, str], *, timeout_s: float, log: bytearray) -> AgentResult:
        """Run one episode of the agent. It is cancelled after `timeout_s` seconds, or with this call.

        given: the task as JSON. log: receives the end of the process's output meanwhile.
        """
        number, server, timed_out = next(self._numbers), None, False
        found = AgentResult(failure=NO_START)
        try:
            async with asyncio.timeout(timeout_s):
                if (server := await self._find_server(environment)) is not None:
                    await server.play(number, given)
        except TimeoutError:
            timed_out = True
        finally:
            # also after a cancellation: no agent outlives the episode
            if server is not None:
                found = await server.end_episode(number, log)
        return AgentResult(parts=found.parts, timed_out=True) if timed_out else found

    async def close(self) -> None:
        """End the process."""
        if self._server is not None:
            await self._server.end("the run has ended")

    async def _find_server(self, environment: dict[str, str]) -> _Server | None:
        """Return the running process, or start it. None: the launcher cannot."""
        # episodes start concurrently: the first starts the process, the others wait for it
        async with self._starting:
            if self._server is None or self._server.is_over:
                server = _Server(self._launcher.plan.name)
                self._server = server if await server.start(self._launcher, environment) else None
            return self._server


class _Server:
    """Process with episodes in flight."""

    def __init__(self, name: str):
        self.name, self.is_over = name, False
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[AgentResult]] = {}
        self._so_far: dict[int, dict[str, float]] = {}
        self._printed: dict[int, int] = {}
        """Bytes that the process had printed when an episode began."""
        self._ended: set[int] = set()
        self._why: asyncio.Future[str] = self._loop.create_future()
        """Reason to end the process."""
        self._said_twice = False

    async def start(self, launcher: LauncherClient, environment: dict[str, str]) -> bool:
        """Start the process. False: the launcher cannot."""
        read_end, write_end = os.pipe()
        self._input, _ = await self._loop.connect_write_pipe(
            lambda: _Input(self), os.fdopen(write_end, "wb", buffering=0)
        )
        process = None
        try:
            process = await launcher.start(lambda: os.dup(read_end), share_endpoint(environment), self._make_output)
        finally:
            os.close(read_end)
            if process is None:
                self._input.close()
        if process is None:
            return False
        self._process = process
        self._watching = start_task(self._watch(process))
        return True

    async def play(self, number: int, given: str) -> None:
        """Give the process an episode, and wait for the end."""
        answer = self._answers[number] = self._loop.create_future()
        self._printed[number] = self._process.output.printed
        self._process.output.show_more()
        self._send(f'{{"id": {number}, "task": {given}}}')
        await asyncio.wait([answer])

    async def end_episode(self, number: int, log: bytearray) -> AgentResult:
        """Cancel an episode unless it has ended. Return the result; without one, the numbers so far."""
        answer = self._answers[number]
        if not answer.done():
            self._send(f'{{"cancel": {number}}}')
            await asyncio.wait([answer], timeout=AGENT_CANCEL_TIMEOUT_S)
        if not answer.done():
            await self.end(
                f"the agent's process was killed: it did not end an episode within {AGENT_CANCEL_TIMEOUT_S:g} s of a "
                "cancel (a call that blocks in `async def run` stops all episodes: await it, or set "
                "rollout.agent.serve: false)"
            )
        self._ended.add(number)
        output, printed = self._process.output, self._printed.pop(number)
        log += output.log[-min(KEPT_OF_LOG, output.printed - printed) :] if output.printed > printed else b""
        found, so_far = self._answers.pop(number).result(), self._so_far.pop(number, {})
        return found if found.parts else AgentResult(parts=so_far, failure=found.failure)

    async def end(self, why: str) -> None:
        """End the process, and fail the episodes."""
        self.fail(why)
        await asyncio.wait([self._watching])

    def fail(self, why: str) -> None:
        """Begin to end the process, unless that has begun."""
        self.is_over = True
        if not self._why.done():
            self._why.set_result(why)

    async def _watch(self, process: AgentProcess) -> None:
        """Wait for the process to end, or end it. Fail the episodes that are left."""
        waiting = start_task(process.wait())
        await asyncio.wait([waiting, self._why], return_when=asyncio.FIRST_COMPLETED)
        self.is_over = True
        waiting.cancel()
        await asyncio.wait([waiting])
        await process.end()
        self._input.close()
        why = self._why.result() if self._why.done() else describe_exit(process.status, process.output.log)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(AgentResult(failure=why))

    def _send(self, line: str) -> None:
        if not self._input.is_closing():
            self._input.write(line.encode() + b"\n")

    def _make_output(self) -> Output:
        return Output(bytearray(), lambda line: self._loop.call_soon_threadsafe(self._take, line))

    def _take(self, line: bytes) -> None:
        """Take a line of the process."""
        try:
            message = read_message(line)
        except ValueError as error:
            return self.fail(str(error))
        answer = self._answers.get(message.id)
        if answer is not None and not answer.done():
            if message.so_far is None:
                answer.set_result(message.result)
            else:
                self._so_far[message.id] = message.so_far
        elif answer is None and message.id not in self._ended:
            self.fail(f"the agent wrote a result of an episode {message.id}, which it was not given")
        elif not self._said_twice:
            self._said_twice = True
            say(f"rollout.agent: {self.name} writes more than one result of an episode: the first counts")


class _Input(asyncio.BaseProtocol):
    """Standard input of the process. The process must not close it."""

    def __init__(self, server: _Server):
        self._server = server

    def connection_lost(self, exc: Exception | None) -> None:
        # one that is dying closes it too, and its exit code says more
        why = "the agent's process closed its standard input, from which it reads tasks"
        asyncio.get_running_loop().call_later(ERROR_GRACE_S, self._server.fail, why)


def share_endpoint(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process with many episodes, in which no variable names the endpoint of one.

    A client that reads these variables gets an error of the gateway, and never reaches another server.
    """
    address = re.sub(r"/s/[^/]+/", "/s/use-base_url-of-the-task/", environment["OPENAI_BASE_URL"])
    key = f"use-api_key-of-the-task-{secrets.token_hex(8)}"  # unique, since it marks the processes
    return environment | name_clients(address, key)
