"""Launcher of a worker's agent processes: `python -m rollouts.agents.launcher FD`.

It imports the agent's file once. Each episode is a fork, so imports are shared and nothing else is. A command is also
executed in such a fork. Each fork is a session leader, and dies with this process.

Messages over the socket FD are JSON objects, the plan first. {"id", "environment"} starts an episode; three file
descriptors (task, result, errors) come with it. {"end": id} kills it. Replies are {"ready"} or {"refusal"}, and {"id",
"status"} once an episode's process and all descendants are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import inspect
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from core.errors import UserError
from core.loading import FileSpec, load_module
from rewards.worker import LONGEST_FAILURE, PR_SET_PDEATHSIG, call_user_code
from rollouts.agents.task import RESULT_FD, Task

# From <linux/prctl.h>: Python has no constant for it.
PR_SET_CHILD_SUBREAPER = 36
MARK = "FEYNRL_EPISODE"
"""Environment variable with the episode number. Every process that the agent starts inherits it."""
LARGEST_MESSAGE = 2**16
"""Maximum size of a socket message, in bytes."""
ONE_EPISODE = "--one-episode"
"""Argument of a fresh interpreter that runs one episode. The task is on stdin; the result goes to RESULT_FD."""
CANNOT_START = 127
"""Exit code of a command that cannot be started."""


def main(fd: int) -> None:
    """Serve start and end messages until the worker closes the socket or dies."""
    libc = ctypes.CDLL(None)
    # dies with the worker, even if that is killed
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of an agent become children of this process, which kills them
    worker = socket.socket(fileno=fd)
    worker.set_inheritable(False)
    if not (given := worker.recv(LARGEST_MESSAGE)):  # the run was over before it needed an agent
        return
    plan = json.loads(given)
    try:
        run = load_agent(plan["file"])
    except UserError as error:
        worker.send(json.dumps({"refusal": str(error)}).encode())
        return
    worker.send(json.dumps({"ready": True}).encode())
    Launcher(worker, plan, run, has_threads=threading.active_count() > 1).serve()


def load_agent(file: dict[str, Any] | None) -> Callable[[Task], Any] | None:
    """Import an agent's file and return the function `run`. Raises UserError if there is none."""
    if file is None:
        return None
    module = load_module(FileSpec(**file))
    return find_run(module, file["path"])


def find_run(module: ModuleType, path: str) -> Callable[[Task], Any]:
    """Return the function `run` of an agent's file. Raises UserError if there is none."""
    run = getattr(module, "run", None)
    if not callable(run):
        raise UserError(f"rollout.agent.file: {path} must define a function run(task) that returns named numbers")
    return run


class Launcher:
    """Parent of all episode processes."""

    def __init__(
        self, worker: socket.socket, plan: dict[str, Any], run: Callable[[Task], Any] | None, *, has_threads: bool
    ):
        """has_threads: the import has started threads. A fork would lack them."""
        self.worker, self.plan, self.run, self.has_threads = worker, plan, run, has_threads
        self.running: dict[int, tuple[int, int]] = {}
        """Process id -> episode number, and a pidfd that becomes readable at exit."""

    def serve(self) -> None:
        """Serve messages of the worker and exits of episodes."""
        while True:
            poll = select.poll()
            for fd in (self.worker.fileno(), *(handle for _, handle in self.running.values())):
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            for pid in [pid for pid, (_, handle) in self.running.items() if handle in ready]:
                self._end(pid)
            if self.worker.fileno() in ready and not self._take_message():
                self._end_all()
                return

    def _take_message(self) -> bool:
        """Handle the next message. Return False if the socket is closed."""
        given, handles, _, _ = socket.recv_fds(self.worker, LARGEST_MESSAGE, 3)
        if not given:
            return False
        message = json.loads(given)
        if "end" in message:
            for pid in [pid for pid, (number, _) in self.running.items() if number == message["end"]]:
                _kill_group(pid)
            return True
        pid = os.fork()
        if pid == 0:
            self._become_agent(message, handles)
        # an open copy here would hide the end of the agent's pipes
        for handle in handles:
            os.close(handle)
        # a pidfd, since the process id of a dead process may be reused
        self.running[pid] = (message["id"], os.pidfd_open(pid))
        return True

    def _become_agent(self, message: dict[str, Any], handles: list[int]) -> None:
        """Run one episode in the forked process, then exit."""
        status = CANNOT_START
        try:
            # a new process group, so that it can be killed as a whole
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # the agent must reach neither the launcher's socket nor the processes of other episodes
            self.worker.close()
            for _, handle in self.running.values():
                os.close(handle)
            os.environ.update(message["environment"] | {MARK: str(message["id"])})
            # Copies from 10 on, since 0 to 3 are assigned below. They close on exec, so what the agent starts cannot
            # keep the pipes open.
            task, result, errors = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in handles)
            for fd in handles:
                os.close(fd)
            if self.run is None:
                self._become_command([task, result, errors], self.plan["command"])
            # A lock of a lost thread may stay locked for ever in a fork, so a fresh interpreter imports the file again.
            if self.has_threads:
                again = ["-P", "-m", "rollouts.agents.launcher", ONE_EPISODE, json.dumps(self.plan["file"])]
                self._become_command([task, result, 2], [sys.executable, *again])
            status = run_file(self.run, self.plan["file"]["path"], task, result)
        except BaseException:  # a border: the process ends here, whatever the user's code raises
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # not sys.exit, which would wait for threads of the agent

    def _become_command(self, handles: list[int], command: list[str]) -> None:
        task, result, errors = handles
        os.dup2(task, 0)
        os.dup2(result, RESULT_FD)
        os.dup2(errors, 2)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(CANNOT_START)

    def _end(self, pid: int) -> None:
        """Reap an exited process, kill its descendants, and report the status."""
        number, handle = self.running.pop(pid)
        os.close(handle)
        # killed before it is reaped: until then the process id, which names the group, cannot be reused
        _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        end_leftovers(f"{MARK}={number}", running=self.running.keys())
        self._report({"id": number, "status": os.waitstatus_to_exitcode(status)})

    def _end_all(self) -> None:
        for pid in self.running:
            _kill_group(pid)
        end_leftovers("", running=())

    def _report(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the worker is gone; the next recv returns nothing and ends this process
            self.worker.send(json.dumps(message).encode())


def run_file(run: Callable[[Task], Any] | None, path: str, task: int, result: int) -> int:
    """Run one episode of an agent's file. task, result: file descriptors. Return the exit code."""
    with open(task, encoding="utf-8") as file:
        given = json.load(file)
    line = json.dumps(run_agent(run, Task(**given), path))
    with open(result, "w", encoding="utf-8") as file:
        file.write(line + "\n")
    return 0


def run_agent(run: Callable[[Task], Any] | None, task: Task, path: str) -> dict[str, Any]:
    """Run the agent's function. Return {"parts", "failure"}: named numbers, or a failure."""
    assert run is not None
    failures: list[str] = []

    def call() -> Any:
        try:
            found = run(task)
            return asyncio.run(_wait(found)) if inspect.isawaitable(found) else found
        except SystemExit as error:
            failures.append(f"the agent ended its process by sys.exit({error.code!r})")
        except BaseExceptionGroup as error:
            failures.append(name_failure(error, path))
        except Exception as error:  # a border: the user's code
            failures.append(name_failure(error, path))
        return {}

    parts, failure = call_user_code(call, "run()")
    return {"parts": parts, "failure": failures[0] if failures else failure}


async def _wait(found: Any) -> Any:
    return await found


def name_failure(error: BaseException, path: str) -> str:
    """Describe an error, with the line in the agent's file, or else the line that raised it."""
    # asyncio.TaskGroup wraps errors in groups; the first of them is the cause
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == path] or frames
    said = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_FAILURE]
    return f"{said} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else said


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_leftovers(mark: str, *, running: Collection[int]) -> None:
    """Kill leftover processes of ended episodes: those with the mark, and all orphans if no episode runs.

    running: process ids of running episodes.
    """
    me = os.getpid()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            marks = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        # The parent id is the second field after the name in parentheses. A name may itself contain parentheses. An
        # orphan without a mark may belong to any episode, so it lives until none runs.
        is_orphan = int(stat.rpartition(")")[2].split()[1]) == me and pid not in running
        if pid == me or not ((mark and mark.encode() in marks) or (is_orphan and not running)):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        if is_orphan:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


if __name__ == "__main__":
    if sys.argv[1] == ONE_EPISODE:
        spec = json.loads(sys.argv[2])
        os._exit(run_file(load_agent(spec), spec["path"], 0, RESULT_FD))
    main(int(sys.argv[1]))
