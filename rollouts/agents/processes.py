"""Agent processes of a rollout worker, one per episode.

A harness that raises, hangs, dies or returns an invalid result fails only the current episode, with one sentence.
rollouts/agents/launcher.py starts the processes and kills their descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
from dataclasses import asdict, dataclass, field

from core.cluster.child_process import start_module
from core.errors import RunStopped, UserError, shorten
from core.text.secrets import HIDDEN
from core.timing.deadlines import AGENT_END_TIMEOUT_S, AGENT_START_TIMEOUT_S
from rewards.worker import call_user_code
from rollouts.agents.task import RESULT_FD, AgentPlan, Task

LARGEST_RESULT = 2**20
"""Maximum size of an agent's result, in bytes."""
KEPT_OF_ERRORS = 2**12
"""Bytes kept from the end of a command's standard error. Failures quote the last line."""
LARGEST_MESSAGE = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """Result of an agent's episode: named numbers or a failure, never both."""

    parts: dict[str, float] = field(default_factory=dict[str, float])
    failure: str = ""


class AgentProcesses:
    """Owner of a rollout worker's launcher process. `close()` ends all processes."""

    def __init__(self, plan: AgentPlan):
        """Start the launcher. Errors of the agent's import are raised before the first episode."""
        self.plan = plan
        # message boundaries are kept, so every recv is one JSON object
        self._socket, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        # another machine may not have this folder
        folder = plan.folder if os.path.isdir(plan.folder) else None
        self._launcher = start_module("rollouts.agents.launcher", far_end.fileno(), folder=folder)
        far_end.close()
        file = None if plan.file is None else asdict(plan.file)
        self._socket.send(json.dumps({"file": file, "command": list(plan.command)}).encode())
        self._numbers = itertools.count()
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._ready = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening, self._sending = asyncio.Lock(), asyncio.Lock()

    async def run(self, task: Task, *, timeout_s: float) -> AgentResult:
        """Run the agent of one episode. It is killed after `timeout_s` seconds, or on cancellation.

        Raises UserError if the agent's file cannot be used.
        """
        given = write_task(task)
        try:
            async with asyncio.timeout(timeout_s):
                await self._open()
                found = await self._run_process(given, name_endpoint(task))
        except TimeoutError:
            return AgentResult(failure=f"the agent has not ended after {timeout_s:g} s (see rollout.timeout_s)")
        # an error message may quote the key, and it ends up in logs
        return AgentResult(parts=found.parts, failure=shorten(found.failure.replace(task.api_key, HIDDEN)))

    async def _run_process(self, given: str, environment: dict[str, str]) -> AgentResult:
        number = next(self._numbers)
        ended = self._ended[number] = asyncio.get_running_loop().create_future()
        result, errors = _Reader(LARGEST_RESULT), _Reader(None)
        try:
            await self._start(number, given, environment, result, errors)
            # not `await ended`: a cancellation would mark it as done, and _end would not kill the agent
            await asyncio.wait([ended])
            return self._read_result(result, errors, ended.result())
        finally:
            # also after a timeout or a cancellation: no agent outlives the episode
            await self._end(number, ended)
            result.close()
            errors.close()

    def wait_for_import(self) -> bytes:
        """Return the launcher's first message, without an event loop."""
        self._socket.settimeout(AGENT_START_TIMEOUT_S)
        try:
            return self._socket.recv(LARGEST_MESSAGE)
        except TimeoutError as error:
            raise UserError(f"rollout.agent.file: {self.plan.name} takes too long to import") from error
        except ConnectionError:
            return b""

    def kill(self) -> None:
        """Kill the launcher immediately. Only valid while no agent runs."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()

    async def close(self) -> None:
        """End all agents and the launcher."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            loop.remove_reader(self._socket)
        self._socket.close()  # the launcher sees end of file, then kills all agents and exits
        try:
            await asyncio.to_thread(self._launcher.wait, AGENT_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()

    async def _open(self) -> None:
        """Wait for the agent's import, and receive launcher messages in this event loop."""
        # Episodes start concurrently: the first waits for the import, the others for the lock.
        async with self._opening:
            loop = asyncio.get_running_loop()
            if not self._ready:
                await self._wait_until_ready(loop)
            if self._loop is not loop:
                # a reader belongs to one event loop
                loop.add_reader(self._socket, self._read_messages)
                self._loop = loop

    async def _wait_until_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            async with asyncio.timeout(AGENT_START_TIMEOUT_S):
                given = await loop.sock_recv(self._socket, LARGEST_MESSAGE)
        except TimeoutError as error:
            raise UserError(f"rollout.agent.file: {self.plan.name} takes too long to import") from error
        except ConnectionError:
            given = b""
        check_ready(given, self.plan)
        self._ready = True

    async def _start(
        self, number: int, task: str, environment: dict[str, str], result: _Reader, errors: _Reader
    ) -> None:
        """Send the launcher a start message, with the task as the process's standard input."""
        # a memory file, not a pipe: a task with images exceeds a pipe's buffer, and nobody reads it yet
        given = os.memfd_create("task")
        try:
            with open(given, "w", encoding="utf-8", closefd=False) as file:
                file.write(task)
            os.lseek(given, 0, os.SEEK_SET)
            message = json.dumps({"id": number, "environment": environment}).encode()
            await self._send(message, [given, result.far_end, errors.far_end])
        finally:
            os.close(given)
            result.begin()
            errors.begin()

    async def _send(self, message: bytes, handles: list[int]) -> None:
        """Send a message to the launcher. Wait if the socket is full. Raises RunStopped if the launcher is gone."""
        loop = asyncio.get_running_loop()
        # one writer at a time, since a second add_writer would replace the first
        async with self._sending:
            while True:
                try:
                    socket.send_fds(self._socket, [message], handles)
                    return
                except BlockingIOError:
                    writable = asyncio.Event()
                    loop.add_writer(self._socket, writable.set)
                    try:
                        await writable.wait()
                    finally:
                        loop.remove_writer(self._socket)
                except OSError as error:
                    raise RunStopped(f"the process that starts the agents ({self.plan.name}) is gone") from error

    async def _end(self, number: int, ended: asyncio.Future[int]) -> None:
        """End an episode's process and all descendants, and wait for their exit."""
        if not ended.done():
            with contextlib.suppress(RunStopped, TimeoutError):
                async with asyncio.timeout(AGENT_END_TIMEOUT_S):
                    await self._send(json.dumps({"end": number}).encode(), [])
                    await asyncio.wait([ended])
        self._ended.pop(number, None)

    def _read_messages(self) -> None:
        """Process the launcher's reports."""
        with contextlib.suppress(BlockingIOError):
            while given := self._socket.recv(LARGEST_MESSAGE):
                message = json.loads(given)
                ended = self._ended.get(message["id"])
                if ended is not None and not ended.done():
                    ended.set_result(message["status"])
            asyncio.get_running_loop().remove_reader(self._socket)
            for ended in self._ended.values():  # an empty message: the launcher is gone, and all agents with it
                if not ended.done():
                    ended.set_result(-signal.SIGKILL)

    def _read_result(self, result: _Reader, errors: _Reader, status: int) -> AgentResult:
        if result.is_too_long:
            return AgentResult(failure=f"the agent returned more than {LARGEST_RESULT} bytes")
        if status:
            how = f"exited with code {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
            said = errors.read().decode(errors="replace").strip().splitlines()
            return AgentResult(failure=f"the agent's process {how}" + (f": {said[-1].strip()}" if said else ""))
        line = result.read().decode(errors="replace")
        if self.plan.file is not None:
            if not line:
                return AgentResult(failure="the agent ended its process before run() had returned")
            found = json.loads(line)
            return AgentResult(parts=found["parts"], failure=found["failure"])
        return read_rewards(line)


def check_agent(plan: AgentPlan) -> None:
    """Raise UserError if the agent's file cannot be imported. A separate process imports it."""
    if plan.file is None:
        return
    processes = AgentProcesses(plan)
    try:
        check_ready(processes.wait_for_import(), plan)
    finally:
        processes.kill()


def check_ready(given: bytes, plan: AgentPlan) -> None:
    """Raise UserError unless the launcher has imported the agent."""
    if not given:
        raise UserError(f"rollout.agent.file: {plan.name} ended the process that imported it")
    if refusal := json.loads(given).get("refusal"):
        raise UserError(refusal)


def write_task(task: Task) -> str:
    """Return a task as JSON. Raises UserError for a value that JSON cannot represent."""
    try:
        return json.dumps(task.as_json())
    except (TypeError, ValueError) as error:
        raise UserError(
            f"row {task.id}: a column cannot be given to an agent as JSON ({error}): leave the column out of the data"
        ) from error


def read_rewards(line: str) -> AgentResult:
    """Parse the numbers written by a command.

    >>> read_rewards('{"solved": 1}')
    AgentResult(parts={'solved': 1.0}, failure='')
    """
    try:
        found = json.loads(line)
    except ValueError:
        what = f"the agent wrote {line!r:.80} to file descriptor {RESULT_FD}" if line else "the agent wrote nothing"
        where = "" if line else f" to file descriptor {RESULT_FD}"
        return AgentResult(failure=what + where + ', where one line such as {"solved": 1.0} is expected')
    parts, failure = call_user_code(lambda: found, "the agent")
    return AgentResult(parts=parts, failure=failure)


def name_endpoint(task: Task) -> dict[str, str]:
    """Return the environment variables with which OpenAI clients reach the gateway directly, without a proxy."""
    local = "127.0.0.1,localhost"
    before = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    no_proxy = f"{before},{local}" if before else local
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        # programs read one spelling or the other
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


class _Reader:
    """Pipe from an agent's process, read in the event loop."""

    def __init__(self, limit: int | None):
        """limit: maximum bytes. None: copy to standard error, and keep only the last bytes."""
        self.near_end, self.far_end = os.pipe()
        os.set_blocking(self.near_end, False)
        self.limit, self.data = limit, b""
        self.is_too_long = False

    def begin(self) -> None:
        """Start reading. Only the agent's process keeps the other end open."""
        # an open copy here would hide the end of file
        os.close(self.far_end)
        asyncio.get_running_loop().add_reader(self.near_end, self._take)

    def read(self) -> bytes:
        """Read the rest of the pipe, and return all data."""
        while self._take():
            pass
        return self.data

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.near_end)
        os.close(self.near_end)

    def _take(self) -> bool:
        """Read available data. Return whether there may be more."""
        try:
            given = os.read(self.near_end, 2**16)
        except BlockingIOError:
            return False
        if not given:
            asyncio.get_running_loop().remove_reader(self.near_end)
            return False
        if self.limit is None:
            # shown as it comes: it is the agent's log
            os.write(2, given)
            self.data = (self.data + given)[-KEPT_OF_ERRORS:]
        elif len(self.data) + len(given) > self.limit:
            self.is_too_long = True  # the rest is read and discarded, or the agent would block on a full pipe
        else:
            self.data += given
        return True
