"""Start and end of an agent's processes, through the launcher of a rollout worker (rollouts/agents/launcher.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from core.cluster.child_process import start_module
from core.errors import UserError, quote
from core.timing.deadlines import AGENT_END_TIMEOUT_S, AGENT_START_TIMEOUT_S
from core.timing.progress import say
from rollouts.agents.task import HOST_KEY, LARGEST_MESSAGE, AgentPlan
from rollouts.output import Output

KEY_NAME = "OPENAI_API_KEY"
"""Environment variable with the key of a process. Every process that the agent starts inherits it."""
MOST_STARTS = 3
"""Maximum number of attempts to start a process, each with a new launcher."""
NO_START = f"the process that starts the agents was killed {MOST_STARTS} times in a row"
"""Failure of an episode whose process could not be started."""


def name_clients(base_url: str, api_key: str) -> dict[str, str]:
    """Return the environment variables from which clients read address and key."""
    return {
        "OPENAI_BASE_URL": base_url,
        KEY_NAME: api_key,
        # Anthropic's clients add /v1 themselves
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        # older clients read the first, and Anthropic's prefer the second to a key
        "OPENAI_API_BASE": base_url,
        "ANTHROPIC_AUTH_TOKEN": api_key,
    }


class AgentProcess:
    """Running process of an agent, below a guard that ends it with all descendants."""

    def __init__(self, control: socket.socket, guard: int | None, mark: str, output: Output):
        """guard: pidfd of the guard, if it is known. mark: NAME=value in the environment of the descendants."""
        self._control, self._guard, self._mark, self.output = control, guard, mark, output
        self.status: int | None = None
        """Exit code; None while it runs, and if the guard was killed."""

    async def wait(self) -> None:
        """Wait until the process and all descendants are gone."""
        if said := await _receive(self._control):
            self.status = json.loads(said)["status"]

    async def end(self) -> None:
        """Kill the processes that are left, and read the rest of their output. Never called twice."""
        if self.status is None:
            await self._end_guard()
            # a guard that was killed has ended nobody, and the launcher, to which they fall, may be dead too
            await asyncio.to_thread(kill_marked, self._mark)
        self._control.close()
        if self._guard is not None:
            os.close(self._guard)
        await self.output.finish()

    async def _end_guard(self) -> None:
        """Let the guard kill the agent's process and all descendants, and wait for its exit."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        try:
            async with asyncio.timeout(AGENT_END_TIMEOUT_S):
                while await _receive(self._control):
                    pass
        except TimeoutError:  # the agent may have stopped it
            if self._guard is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._guard, signal.SIGKILL)


class LauncherClient:
    """Owner of the launcher, a process that imports the agent's file. `close()` ends all processes."""

    def __init__(self, plan: AgentPlan):
        """Start the launcher. Errors of the agent's import are raised before the first episode."""
        self.plan = plan
        self._opening, self._sending = asyncio.Lock(), asyncio.Lock()
        self._has_imported = self._serves = False
        self._launch()

    async def serves(self) -> bool:
        """Tell whether a process plays many episodes. Raises UserError if the agent's file cannot be used."""
        await self._open()
        return self._serves

    async def start(
        self, open_given: Callable[[], int], environment: dict[str, str], make_output: Callable[[], Output]
    ) -> AgentProcess | None:
        """Start a process. None: the launcher was killed MOST_STARTS times in a row.

        open_given: returns a file descriptor for the standard input, which is closed here.
        """
        for _ in range(MOST_STARTS):
            launcher = await self._open()
            if (process := await self._try_start(launcher, open_given, environment, make_output())) is not None:
                return process
            self._replace_launcher(launcher)
        return None

    async def _try_start(
        self, launcher: socket.socket, open_given: Callable[[], int], environment: dict[str, str], output: Output
    ) -> AgentProcess | None:
        """Start a process. None: the launcher has died before it could do so."""
        control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        guard, said, given = None, b"", open_given()
        message = json.dumps({"environment": environment}).encode()
        try:
            try:
                is_sent = await self._send(launcher, message, [given, *output.far_ends, far_end.fileno()])
            finally:
                os.close(given)
                far_end.close()
                output.begin()
            if is_sent and (said := await _receive(control)):
                with contextlib.suppress(ProcessLookupError):
                    # a pidfd, since the process id of a dead process may be reused
                    guard = os.pidfd_open(json.loads(said)["guard"])
        finally:
            process = AgentProcess(control, guard, f"{KEY_NAME}={environment[KEY_NAME]}", output)
            # also after a timeout or a cancellation: no agent outlives the episode
            if not said:
                await process.end()
        return process if said else None

    def _launch(self) -> None:
        # message boundaries are kept, so every recv is one JSON object
        self._socket, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        # another machine may not have this folder
        folder = self.plan.folder if os.path.isdir(self.plan.folder) else None
        self._launcher = start_module("rollouts.agents.launcher", far_end.fileno(), folder=folder, hidden=HOST_KEY)
        far_end.close()
        file = None if self.plan.file is None else asdict(self.plan.file)
        plan = {"file": file, "command": list(self.plan.command), "serve": self.plan.serve}
        with contextlib.suppress(BrokenPipeError):  # it is dead already, and whoever waits for it is told
            self._socket.send(json.dumps(plan).encode())
        self._ready = False

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
        """Kill the launcher immediately."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()

    async def close(self) -> None:
        """End all agents and the launcher."""
        self._socket.close()  # the launcher sees end of file, waits for the guards and exits
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
            self._serves = check_ready(given, self.plan)
        self._ready = self._has_imported = True

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


def check_agent(plan: AgentPlan) -> None:
    """Raise UserError if the agent's file cannot be imported. A separate process imports it."""
    if plan.file is None:
        return
    launcher = LauncherClient(plan)
    try:
        check_ready(launcher.wait_for_import(), plan)
    finally:
        launcher.kill()


def check_ready(given: bytes, plan: AgentPlan) -> bool:
    """Return whether a process plays many episodes. Raises UserError unless the launcher has imported the agent."""
    if not given:
        raise UserError(f"rollout.agent.file: {plan.name} ended the process that imported it")
    ready = json.loads(given)
    if refusal := ready.get("refusal"):
        raise UserError(refusal)
    return ready["serves"]


async def _receive(control: socket.socket) -> bytes:
    """Return the next message of a guard; b"" if it is gone."""
    try:
        return await asyncio.get_running_loop().sock_recv(control, LARGEST_MESSAGE)
    except ConnectionError:
        return b""


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
