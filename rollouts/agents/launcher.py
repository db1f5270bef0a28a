"""Launcher of a worker's agent processes: `python -m rollouts.agents.launcher FD`.

It imports the agent's file once. Each episode is a fork, so imports are shared and nothing else is. A command is also
executed in such a fork. Between the two stands a guard, one per episode: an agent that kills its parent ends its own
episode, and the death of this process ends none.

Messages over the socket FD are JSON objects, the plan first, answered by {"serves"} or {"refusal"}. "serves" tells
whether a process plays many episodes (rollouts/agents/served.py) or one. {"environment"} starts a process; four file
descriptors (tasks, results, log, control) come with it. Over the control socket the guard says {"guard": process id},
and {"status"} once the agent's process and all descendants are gone. It kills them when the worker closes that socket
or dies.
"""

from __future__ import annotations

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
from core.timing.deadlines import AGENT_END_TIMEOUT_S
from rewards.worker import PR_SET_PDEATHSIG
from rollouts.agents.lazy_imports import LazyImports
from rollouts.agents.run_file import run_file
from rollouts.agents.task import LARGEST_MESSAGE, RESULT_FD, Task

# From <linux/prctl.h>: Python has no constant for it.
PR_SET_CHILD_SUBREAPER = 36
PLAY = "--play"
"""Argument of a fresh interpreter that plays episodes. Tasks are on stdin; results go to RESULT_FD."""
MOST_ROUNDS = 1000
"""Maximum number of generations of descendants that are killed: a bound for one that forks without end."""
CANNOT_START = 127
"""Exit code of a command that cannot be started."""


def main(fd: int) -> None:
    """Serve start and end messages until the worker closes the socket or dies."""
    libc = ctypes.CDLL(None)
    # dies with the worker, even if that is killed
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of a guard become children of this process, which kills them
    worker = socket.socket(fileno=fd)
    worker.set_inheritable(False)
    if not (given := worker.recv(LARGEST_MESSAGE)):  # the run was over before it needed an agent
        return
    plan = json.loads(given)
    try:
        run = load_agent(plan["file"])
        serves = choose_serving(plan, run)
    except UserError as error:
        answer(worker, {"refusal": str(error)})
        return
    sys.stdout.flush()  # or every fork would print again what the import has printed
    answer(worker, {"serves": serves})
    plan["serve"] = serves
    Launcher(worker, plan, run, has_threads=threading.active_count() > 1).serve()


def answer(worker: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the run has ended meanwhile, and the next read says so
        worker.send(json.dumps(message).encode())


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


def choose_serving(plan: dict[str, Any], run: Callable[[Task], Any] | None) -> bool:
    """Return whether one process plays all episodes. Raises UserError if it is to, and `run` is plain."""
    is_async = inspect.iscoroutinefunction(run)
    if plan["serve"] and run is not None and not is_async:
        raise UserError(
            f"rollout.agent.serve: {plan['file']['path']} must define run(task) by `async def`, since many episodes "
            "share a process: do so, or leave serve out"
        )
    return is_async if plan["serve"] is None else plan["serve"]


class Launcher:
    """Parent of the guards of all episodes."""

    def __init__(
        self, worker: socket.socket, plan: dict[str, Any], run: Callable[[Task], Any] | None, *, has_threads: bool
    ):
        """has_threads: the import has started threads. A fork would lack them."""
        self.worker, self.plan, self.run, self.has_threads = worker, plan, run, has_threads
        self.guards: dict[int, int] = {}
        """Process id -> pidfd that becomes readable at exit."""
        # for forks that play one episode each
        self.lazy = None if run is None or plan["serve"] or has_threads else LazyImports()

    def serve(self) -> None:
        """Serve messages of the worker and exits of guards."""
        while True:
            poll = select.poll()
            lazy = None if self.lazy is None else self.lazy.reading
            for fd in (self.worker.fileno(), *self.guards.values(), *(() if lazy is None else (lazy,))):
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if lazy in ready:
                self._import_lazy()
            for pid in [pid for pid, handle in self.guards.items() if handle in ready]:
                self._reap(pid)
            if self.worker.fileno() in ready and not self._take_message():
                break
        for pid, handle in [*self.guards.items()]:
            # A guard ends by itself, since the worker has closed its control socket. One that was killed would leave
            # its descendants to this process, which may be killed next.
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(1000 * AGENT_END_TIMEOUT_S):
                os.kill(pid, signal.SIGKILL)
            self._reap(pid)

    def _take_message(self) -> bool:
        """Start an episode. Return False if the socket is closed."""
        try:
            given, handles, _, _ = socket.recv_fds(self.worker, LARGEST_MESSAGE, 4)
        except ConnectionResetError:  # closed before it read the first message, since it had no episode
            return False
        if not given:
            return False
        report = None if self.lazy is None else self.lazy.open()
        pid = os.fork()
        if pid == 0:
            self._become_guard(json.loads(given)["environment"], handles, report)
        # an open copy here would hide the end of the agent's pipes
        for handle in (*handles, *(() if report is None else (report,))):
            os.close(handle)
        # a pidfd, since the process id of a dead process may be reused
        self.guards[pid] = os.pidfd_open(pid)
        return True

    def _reap(self, pid: int) -> None:
        """Reap a guard. What one that was killed has left is killed too."""
        os.close(self.guards.pop(pid))
        _, status = os.waitpid(pid, 0)
        if status:
            end_children(spared=self.guards.keys())

    def _import_lazy(self) -> None:
        """Import the modules of the first episode. One may start a thread, which forks would lack."""
        assert self.lazy is not None
        self.lazy.take()
        self.has_threads = threading.active_count() > 1

    def _become_guard(self, environment: dict[str, str], handles: list[int], report: int | None) -> None:
        """Start and watch one episode in the forked process, then exit. report: descriptor for lazy imports."""
        status = 1
        try:
            # a session and group of its own, and the parent of every orphan of the agent
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
            # neither the launcher's socket nor the processes of other episodes are the agent's
            self.worker.close()
            for handle in self.guards.values():
                os.close(handle)
            *pipes, control = handles
            with socket.socket(fileno=control) as worker:
                pid = os.fork()
                if pid == 0:
                    worker.close()
                    self._become_agent(environment, pipes, report)
                for pipe in pipes:
                    os.close(pipe)
                watch_agent(pid, worker)
            status = 0
        except BaseException:  # a border: this process must not go on as a second launcher
            traceback.print_exc()
        finally:
            os._exit(status)

    def _become_agent(self, environment: dict[str, str], pipes: list[int], report: int | None) -> None:
        """Run the agent in the forked process, for one episode or many, then exit."""
        status = CANNOT_START
        try:
            # a new process group, so that it can be killed as a whole
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.environ.update(environment)
            # Copies from 10 on, since 0 to 3 are assigned below. They close on exec, so what the agent starts cannot
            # keep the pipes open.
            task, result, log = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in pipes)
            for fd in pipes:
                os.close(fd)
            for fd in (1, 2):
                os.dup2(log, fd)
            if self.run is None:
                return self._become_command([task, result], self.plan["command"])
            # A lock of a lost thread may stay locked for ever in a fork, so a fresh interpreter imports the file again.
            if self.has_threads:
                again = ["-P", "-m", "rollouts.agents.launcher", PLAY, json.dumps(self.plan)]
                self._become_command([task, result], [sys.executable, *again])
            status = run_file(self.run, self.plan["file"]["path"], task, result, many=self.plan["serve"])
            if self.lazy is not None and report is not None:
                self.lazy.report(report)
        except BaseException:  # a border: the process ends here, whatever the user's code raises
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # not sys.exit, which would wait for threads of the agent

    def _become_command(self, pipes: list[int], command: list[str]) -> None:
        task, result = pipes
        os.dup2(task, 0)
        os.dup2(result, RESULT_FD)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
            os._exit(CANNOT_START)


def watch_agent(agent: int, worker: socket.socket) -> None:
    """Wait until the agent's process or the worker's interest ends. Kill all descendants, and report the status."""
    with contextlib.suppress(OSError):  # the worker is gone; the poll ends at once
        worker.send(json.dumps({"guard": os.getpid()}).encode())
    poll = select.poll()
    poll.register(os.pidfd_open(agent), select.POLLIN)
    poll.register(worker, select.POLLIN)
    poll.poll()
    # killed before it is reaped: until then the process id, which names the group, cannot be reused
    with contextlib.suppress(ProcessLookupError):
        os.killpg(agent, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it may not have come to its own group yet
        os.kill(agent, signal.SIGKILL)
    _, status = os.waitpid(agent, 0)
    end_children()
    with contextlib.suppress(OSError):
        worker.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())


def end_children(*, spared: Collection[int] = ()) -> None:
    """Kill and reap the children of this process except `spared`, and then theirs, which become its own."""
    for _ in range(MOST_ROUNDS):
        children = [pid for pid in list_children(os.getpid()) if pid not in spared]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def list_children(parent: int) -> list[int]:
    """List the process ids of a process's children."""
    found: list[int] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended
            continue
        # The parent id is the second field after the name in parentheses. A name may itself contain parentheses.
        if int(stat.rpartition(")")[2].split()[1]) == parent:
            found.append(int(pid))
    return found


if __name__ == "__main__":
    if sys.argv[1] == PLAY:
        given = json.loads(sys.argv[2])
        found = load_agent(given["file"])
        assert found is not None  # a command is executed by the launcher itself
        status = run_file(found, given["file"]["path"], 0, RESULT_FD, many=given["serve"])
        sys.stdout.flush()  # what the agent has printed, since _exit does not
        os._exit(status)
    main(int(sys.argv[1]))
