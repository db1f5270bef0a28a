"""Messages between a worker, the launcher of agents and an agent's process: what each says, and what none leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from core.cluster.child_process import ROOT, start_module
from core.errors import UserError
from core.loading import FileSpec, resolve
from rollouts.agents.launching import LauncherClient
from rollouts.agents.run_file import CANCELLED, run_agent, run_file, serve_episodes
from rollouts.agents.task import AgentPlan, Task
from unit_tests.helpers.processes import wait_until

TASK = {"base_url": "http://h:1/s/7/v1", "api_key": "k", "model": "policy", "messages": []}
WAIT_S = 10.0
"""Seconds after which a message counts as never sent."""


def read_all(handle: int) -> str:
    """Read a pipe to its end, which comes once no process has the other one."""
    text = b""
    while True:
        assert select.select([handle], [], [], WAIT_S)[0], "somebody still has the other end"
        if not (piece := os.read(handle, 2**16)):
            os.close(handle)
            return text.decode()
        text += piece


class Episode:
    """Episode that a launcher was told to start."""

    def __init__(self, launcher: socket.socket, given: str, environment: dict[str, str]) -> None:
        self.control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(WAIT_S)
        task, self.task = os.pipe()
        self.result, result = os.pipe()
        self.log, log = os.pipe()
        handed = [task, result, log, far_end.detach()]
        os.write(self.task, given.encode())
        socket.send_fds(launcher, [json.dumps({"environment": environment}).encode()], handed)
        for handle in handed:
            os.close(handle)
        self.guard: int = json.loads(self.control.recv(1000))["guard"]

    def finish(self) -> tuple[int, str, str]:
        """End the agent's input; return its exit code, its results and its log once nothing of it is left."""
        os.close(self.task)
        with self.control:
            status = json.loads(self.control.recv(1000))["status"]
            return status, read_all(self.result), read_all(self.log)


def name_file(file: Path) -> FileSpec:
    return resolve(str(file), "agents", offers=lambda _: True)


class Launched:
    """Launcher as a worker starts it. end_s: seconds for its guards to end, in place of the usual ones."""

    def __init__(self, folder: Path, *, end_s: float | None = None, **plan: Any) -> None:
        self.socket, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(WAIT_S)
        self.said = folder / "said"
        usual = ["-m", "rollouts.agents.launcher", str(far_end.fileno())]
        hasty = f"import rollouts.agents.launcher as l; l.AGENT_END_TIMEOUT_S = {end_s}; l.main({far_end.fileno()})"
        with far_end, open(self.said, "w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *(usual if end_s is None else ["-c", hasty])],
                pass_fds=[far_end.fileno()],
                # buffered, as where nobody asks for another way
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTHONUNBUFFERED": ""},
                cwd=folder,
                stdout=said,
                stderr=said,
            )
        self.socket.send(json.dumps({"file": None, "command": [], "serve": None} | plan).encode())

    @cached_property
    def answer(self) -> dict[str, Any]:
        """The launcher's first message, which comes once it has imported the agent."""
        return json.loads(self.socket.recv(1000))

    def start(self, given: str = "", **environment: str) -> Episode:
        return Episode(self.socket, given, environment)


@contextlib.contextmanager
def launching(folder: Path, **plan: Any) -> Iterator[Launched]:
    """Yield a launcher, which must have ended in silence one moment after its socket."""
    launched = Launched(folder, **plan)
    try:
        assert "serves" in launched.answer
        yield launched
        launched.socket.close()
        assert (launched.process.wait(WAIT_S), launched.said.read_text()) == (0, "")
    finally:
        launched.socket.close()
        launched.process.kill()
        launched.process.wait()


def list_open(pid: int) -> list[str]:
    """Return the kinds of the descriptors of a process beyond the standard streams."""
    found: list[str] = []
    for handle in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += [os.readlink(f"/proc/{pid}/fd/{handle}").partition(":[")[0]] if int(handle) > 2 else []
    return sorted(found)


def test_episodes_of_a_program_run_beside_each_other_and_leave_nothing(tmp_path):
    with launching(tmp_path, command=["sh", "-c", 'eval "$SCRIPT"']) as launched:
        assert launched.answer == {"serves": False}
        first = launched.start("given", SCRIPT='echo begun; cat >&3; echo "ended by $BY" >&2; exit 3', BY="its input")
        for script, found in (
            ("echo a; echo b >&3", (0, "b\n", "a\n")),
            ("kill -9 $$", (-9, "", "")),
            ("sleep 600 & setsid sleep 600 & exit 1", (1, "", "")),
        ):
            episode = launched.start(SCRIPT=script)
            assert episode.finish() == found, script
            wait_until(lambda pid=episode.guard: not Path(f"/proc/{pid}").exists(), WAIT_S)
        # its own control socket, and the agent's process: none of the two others, of which one might pass for the agent
        second, third = launched.start(SCRIPT="cat"), launched.start(SCRIPT="cat")
        wait_until(lambda: list_open(third.guard) == ["anon_inode", "socket"], WAIT_S)
        assert [third.finish(), second.finish()] == [(0, "", "")] * 2
        assert first.finish() == (3, "given", "begun\nended by its input\n")


def test_a_program_that_is_not_there_is_named_in_the_log(tmp_path):
    with launching(tmp_path, command=["/no/such", "x"]) as launched:
        assert launched.start().finish() == (127, "", "/no/such cannot be started: No such file or directory\n")


def test_a_worker_hears_of_a_launcher_that_dies_while_agents_play(tmp_path):
    launched = Launched(tmp_path, command=["cat"])
    assert launched.answer == {"serves": False}
    episode = launched.start("x")
    launched.process.kill()
    launched.process.wait()
    assert launched.socket.recv(1000) == b"", "no agent has a copy of the socket"
    launched.socket.close()
    assert episode.finish() == (0, "", "x"), "it plays on"


def test_a_guard_that_was_stopped_is_killed_with_all_that_it_left(tmp_path):
    script = "read line; setsid sleep 30 & kill -STOP $PPID; echo stopped; wait"
    with launching(tmp_path, end_s=0.05, command=["sh", "-c", script]) as launched:
        episode = launched.start()
        os.write(episode.task, b"go on\n")
        assert os.read(episode.log, 99) == b"stopped\n"
    os.close(episode.task)
    with episode.control:
        assert (read_all(episode.result), read_all(episode.log)) == ("", "")


IMPORTS_LATE = """
import os, mine
IMPORTED_BY = os.getpid()

def run(task):
    import mine.late
    print("played", task.seed)
    return {"is_fresh": float(IMPORTED_BY == os.getpid()), "seed": task.seed}
"""


def test_an_import_that_starts_a_thread_makes_later_episodes_import_anew(tmp_path):
    """A fork would lack the thread, and what it holds may stay locked for ever."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "late.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "agent.py").write_text(IMPORTS_LATE)
    with launching(tmp_path, file=asdict(name_file(tmp_path / "agent.py"))) as launched:
        for seed, is_fresh in ((4, 0.0), (5, 1.0)):
            episode = launched.start(json.dumps(TASK | {"seed": seed}))
            status, result, log = episode.finish()
            assert (status, log) == (0, f"played {seed}\n")
            assert json.loads(result) == {"parts": {"is_fresh": is_fresh, "seed": float(seed)}, "failure": ""}


HAS_THREAD = """
import sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.executable = "/no/such"

def run(task):
    print("played in a fork")
"""


def test_no_fork_plays_an_episode_that_needs_an_interpreter_of_its_own(tmp_path):
    (tmp_path / "agent.py").write_text(HAS_THREAD)
    with launching(tmp_path, file=asdict(name_file(tmp_path / "agent.py"))) as launched:
        said = "/no/such cannot be started: No such file or directory\n"
        assert launched.start(json.dumps(TASK)).finish() == (127, "", said)


SLOW_IMPORT = """import pathlib, time
pathlib.Path("began").touch()
while not pathlib.Path("closed").exists():
    time.sleep(0.01)
{then}
"""


@pytest.mark.parametrize("then", ["def run(task): return {}", "run = None"])
def test_a_run_that_closes_while_the_agent_is_imported_leaves_no_traceback(tmp_path, then):
    file = tmp_path / "agent.py"
    file.write_text(SLOW_IMPORT.format(then=then))
    launched = Launched(tmp_path, file=asdict(name_file(file)))
    while not (tmp_path / "began").exists():
        assert launched.process.poll() is None
    launched.socket.close()
    (tmp_path / "closed").touch()
    assert (launched.process.wait(60), launched.said.read_text()) == (0, "")


def test_a_launcher_that_dies_before_it_has_its_plan_is_told_in_a_sentence(tmp_path, monkeypatch):
    def start_and_lose(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started = start_module(*args, **options)
        os.killpg(started.pid, 9)
        started.wait()
        return started

    monkeypatch.setattr("rollouts.agents.launching.start_module", start_and_lose)
    file = tmp_path / "agent.py"
    file.write_text("def run(task): return {}")
    client = LauncherClient(AgentPlan(file=name_file(file)))
    try:
        with pytest.raises(UserError, match=r"agent\.py ended the process that imported it$"):
            asyncio.run(client.serves())
    finally:
        client.kill()


def list_sockets() -> set[str]:
    """Return the names of this process's open sockets."""
    found: set[str] = set()
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{handle}"))
    return {name for name in found if name.startswith("socket:")}


def test_a_launcher_that_is_killed_leaves_no_socket(tmp_path):
    (file := tmp_path / "agent.py").write_text("def run(task): ...")
    before = list_sockets()
    client = LauncherClient(AgentPlan(file=name_file(file)))
    opened = list_sockets() - before
    client.kill()
    assert opened and not opened & list_sockets(), "others may still wait for one that is replaced"


# the agent's side -----------------------------------------------------------------------------------------------------


async def later(task: Task) -> dict[str, float]:
    return {"seed": 2.0 * task.seed}


def fail(task: Task) -> dict[str, float]:
    raise ValueError(f"seed {task.seed}")


def leave(task: Task) -> dict[str, float]:
    sys.exit(7)


@pytest.mark.parametrize(
    ("run", "parts", "failure"),
    [
        (lambda task: {"seed": task.seed}, {"seed": 3.0}, ""),
        (later, {"seed": 6.0}, ""),
        (lambda task: {"seed": "x"}, {}, "run() must return numbers"),
        (fail, {}, "ValueError: seed 3 (test_launcher_messages.py, line "),
        (leave, {}, "the agent ended its process by sys.exit(7)"),
    ],
)
def test_one_episode_is_answered_by_numbers_or_a_failure(run: Callable[[Task], Any], parts, failure):
    found = run_agent(run, TASK | {"seed": 3}, __file__, lambda _: None)
    assert found.keys() == {"parts", "failure"} and found["parts"] == parts
    assert found["failure"].startswith(failure) and bool(found["failure"]) == bool(failure)


def test_many_episodes_play_at_once_and_one_can_be_cancelled():
    read_end, write_end = os.pipe()
    told: list[dict[str, Any]] = []
    kept: weakref.WeakSet[Any] = weakref.WeakSet()
    n_kept = 0

    def send(**message: Any) -> None:
        os.write(write_end, json.dumps(message).encode() + b"\n")

    def hear(message: dict[str, Any]) -> None:
        nonlocal n_kept
        told.append(message)
        if "so_far" in message:  # the first waits now
            send(cancel=9)
            send(id=2, task=TASK | {"seed": 5})
            send(id=3, task=TASK | {"seed": -1})
        if message["id"] == 3:
            send(cancel=1)
        if message["id"] == 1 and "failure" in message:
            n_kept = len(kept)
            os.close(write_end)

    async def run(task: Task) -> dict[str, float]:
        kept.add(asyncio.current_task())
        if not task.seed:
            task.report({"a": 1})
            await asyncio.Event().wait()
        if task.seed < 0:
            raise KeyError("k")
        return {"seed": task.seed}

    async def serve() -> None:
        async with asyncio.timeout(WAIT_S):
            await serve_episodes(run, __file__, read_end, hear)

    send(id=1, task=TASK)
    asyncio.run(serve())
    first, second, third, last = told
    assert first == {"id": 1, "so_far": {"a": 1.0}}
    assert second == {"id": 2, "parts": {"seed": 5.0}, "failure": ""}
    assert (third["id"], third["parts"]) == (3, {}) and third["failure"].startswith("KeyError: 'k' (test_launcher_me")
    assert last == {"id": 1, "parts": {}, "failure": CANCELLED}
    assert n_kept == 1, "or the process would grow with every episode"


def test_an_episode_that_is_cancelled_before_it_began_says_so():
    read_end, write_end = os.pipe()
    told: list[dict[str, Any]] = []

    async def run(task: Task) -> dict[str, float]:
        [reader] = [one for one in threading.enumerate() if one.name == "tasks"]
        for message in ({"id": 2, "task": TASK}, {"cancel": 2}):
            os.write(write_end, json.dumps(message).encode() + b"\n")
        os.close(write_end)
        reader.join(WAIT_S)  # no episode can begin meanwhile
        return {"seed": task.seed}

    os.write(write_end, json.dumps({"id": 1, "task": TASK}).encode() + b"\n")
    asyncio.run(serve_episodes(run, __file__, read_end, told.append))
    assert told == [{"id": 1, "parts": {"seed": 0.0}, "failure": ""}, {"id": 2, "failure": CANCELLED}]


@pytest.mark.timeout(60)
def test_a_file_of_many_episodes_reads_tasks_and_writes_results():
    (task, given), (found, result) = os.pipe(), os.pipe()

    async def run(task: Task) -> dict[str, float]:
        os.close(given)  # no other episode comes
        return {"seed": task.seed + 1.0}

    os.write(given, json.dumps({"id": 7, "task": TASK}).encode() + b"\n")
    assert run_file(run, __file__, task, result, many=True) == 0
    os.close(result)
    assert json.loads(read_all(found)) == {"id": 7, "parts": {"seed": 1.0}, "failure": ""}
