"""Agent processes of a rollout worker, one per episode.

A harness that raises, hangs, dies, kills its parent or returns an invalid result fails only the current episode, with
one sentence. rollouts/agents/launcher.py starts the processes and kills their descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from core.cluster.child_process import start_module
from core.errors import UserError, quote, shorten
from core.text.secrets import HIDDEN
from core.timing.deadlines import AGENT_END_TIMEOUT_S, AGENT_START_TIMEOUT_S
from core.timing.progress import say
from rewards.calls import call_user_code
from rollouts.agents.output import LARGEST_RESULT, Output
from rollouts.agents.task import RESULT_FD, AgentPlan, Task

LARGEST_MESSAGE = 2**16
KEY_NAME = "OPENAI_API_KEY"
"""Environment variable with the key of the episode. Every process that the agent starts inherits it."""
MOST_STARTS = 3
"""Maximum number of attempts to start an episode, each with a new launcher."""


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
        self._opening, self._sending = asyncio.Lock(), asyncio.Lock()
        self._has_imported = False
        self._launch()

    def _launch(self) -> None:
        # message boundaries are kept, so every recv is one JSON object
        self._socket, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        # another machine may not have this folder
        folder = self.plan.folder if os.path.isdir(self.plan.folder) else None
        self._launcher = start_module("rollouts.agents.launcher", far_end.fileno(), folder=folder)
        far_end.close()
        file = None if self.plan.file is None else asdict(self.plan.file)
        self._socket.send(json.dumps({"file": file, "command": list(self.plan.command)}).encode())
        self._ready = False

    async def run(self, task: Task, *, timeout_s: float, log: bytearray) -> AgentResult:
        """Run the agent of one episode. It is killed after `timeout_s` seconds, or on cancellation.

        log: receives the end of what the agent prints. Raises UserError if the agent's file cannot be used.
        """
        given = write_task(task)
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(MOST_STARTS):
                    launcher = await self._open()
                    if (found := await self._run_process(launcher, given, name_endpoint(task), log)) is not None:
                        # an error message may quote the key, and it ends up in logs
                        return replace(found, failure=shorten(found.failure.replace(task.api_key, HIDDEN)))
                    self._replace_launcher(launcher)
        except TimeoutError:
            return AgentResult(failure=f"the agent has not ended after {timeout_s:g} s (see rollout.timeout_s)")
        return AgentResult(failure=f"the process that starts the agents was killed {MOST_STARTS} times in a row")

    async def _run_process(
        self, launcher: socket.socket, given: str, environment: dict[str, str], log: bytearray
    ) -> AgentResult | None:
        """Run an agent's process to its end. None: the launcher has died before it could start it."""
        control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        output, guard, status = Output(log), None, None
        try:
            try:
                is_sent = await self._send_task(launcher, given, environment, [*output.far_ends, far_end.fileno()])
            finally:
                far_end.close()
                output.begin()
            if not is_sent or not (said := await _receive(control)):
                return None
            with contextlib.suppress(ProcessLookupError):
                # a pidfd, since the process id of a dead process may be reused
                guard = os.pidfd_open(json.loads(said)["guard"])
            if said := await _receive(control):
                status = json.loads(said)["status"]
        finally:
            # also after a timeout or a cancellation: no agent outlives the episode
            if status is None:
                await _end_guard(control, guard)
                # a guard that was killed has ended nobody, and the launcher, to which they fall, may be dead too
                await asyncio.to_thread(kill_marked, f"{KEY_NAME}={environment[KEY_NAME]}")
            control.close()
            if guard is not None:
                os.close(guard)
            await output.finish()
        return self._read_result(output, status)

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
        self._socket.close()  # the launcher sees end of file, then kills all agents and exits
        try:
            await asyncio.to_thread(self._launcher.wait, AGENT_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()

    async def _open(self) -> socket.socket:
        """Return the socket of the launcher, once it has imported the agent."""
        # Episodes start concurrently: the first waits for the import, the others for the lock.
        async with self._opening:
            if not self._ready:
                await self._wait_until_ready(asyncio.get_running_loop())
            return self._socket

    def _replace_launcher(self, dead: socket.socket) -> None:
        """Start another launcher, unless another episode has done so already. The running agents go on."""
        if self._socket is dead:
            say(f"rollout.agent: the process that starts {quote(self.plan.name)} was killed, and is started again")
            self.kill()
            self._launch()

    async def _wait_until_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            async with asyncio.timeout(AGENT_START_TIMEOUT_S):
                given = await loop.sock_recv(self._socket, LARGEST_MESSAGE)
        except TimeoutError as error:
            raise UserError(f"rollout.agent.file: {self.plan.name} takes too long to import") from error
        except ConnectionError:
            given = b""
        # a later launcher that dies while it imports is the work of an agent, and not of the file
        if given or not self._has_imported:
            check_ready(given, self.plan)
        self._ready = self._has_imported = True

    async def _send_task(
        self, launcher: socket.socket, task: str, environment: dict[str, str], handles: list[int]
    ) -> bool:
        """Send the launcher a start message, with the task as the process's standard input. False: it is gone."""
        # a memory file, not a pipe: a task with images exceeds a pipe's buffer, and nobody reads it yet
        given = os.memfd_create("task")
        try:
            with open(given, "w", encoding="utf-8", closefd=False) as file:
                file.write(task)
            os.lseek(given, 0, os.SEEK_SET)
            return await self._send(launcher, json.dumps({"environment": environment}).encode(), [given, *handles])
        finally:
            os.close(given)

    async def _send(self, launcher: socket.socket, message: bytes, handles: list[int]) -> bool:
        """Send a message to the launcher. Wait if the socket is full. False: the launcher is gone."""
        loop = asyncio.get_running_loop()
        # one writer at a time, since a second add_writer would replace the first
        async with self._sending:
            while True:
                try:
                    socket.send_fds(launcher, [message], handles)
                    return True
                except BlockingIOError:
                    writable = asyncio.Event()
                    loop.add_writer(launcher, writable.set)
                    try:
                        await writable.wait()
                    finally:
                        loop.remove_writer(launcher)
                except OSError:
                    return False

    def _read_result(self, output: Output, status: int | None) -> AgentResult:
        if status is None:
            return AgentResult(
                failure="the agent, or a process that it has started, killed the process that watches over the episode"
            )
        if output.is_too_long:
            return AgentResult(failure=f"the agent returned more than {LARGEST_RESULT} bytes")
        if status:
            how = f"exited with code {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
            said = output.log.decode(errors="replace").strip().splitlines()
            return AgentResult(failure=f"the agent's process {how}" + (f": {said[-1].strip()}" if said else ""))
        line = output.result.decode(errors="replace")
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
    """Return the environment variables with which clients reach the gateway directly, without a proxy."""
    local = "127.0.0.1,localhost"
    before = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    no_proxy = f"{before},{local}" if before else local
    return {
        "OPENAI_BASE_URL": task.base_url,
        KEY_NAME: task.api_key,
        # Anthropic's clients add /v1 themselves
        "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": task.api_key,
        # programs read one spelling or the other
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


async def _receive(control: socket.socket) -> bytes:
    """Return the next message of a guard; b"" if it is gone."""
    try:
        return await asyncio.get_running_loop().sock_recv(control, LARGEST_MESSAGE)
    except ConnectionError:
        return b""


async def _end_guard(control: socket.socket, guard: int | None) -> None:
    """Let the guard kill the agent's process and all descendants, and wait for its exit. guard: its pidfd."""
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_WR)
    try:
        async with asyncio.timeout(AGENT_END_TIMEOUT_S):
            while await _receive(control):
                pass
    except TimeoutError:  # the agent may have stopped it
        if guard is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(guard, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kill every process with `mark`, NAME=value, in its environment, and wait for its exit."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark.encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
            handle = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                poll = select.poll()  # select() takes no number above 1,023
                poll.register(handle, select.POLLIN)
                poll.poll(1000 * AGENT_END_TIMEOUT_S)
            finally:
                os.close(handle)
