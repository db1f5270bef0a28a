"""Code that is run: escapes that are contained, limits that hold, nothing left behind, and no run without a sandbox."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.cluster import guardian
from core.errors import UserError
from rewards.sandbox import Bubblewrap, Limits, Ran, SandboxUnavailable, check_sandbox, seccomp
from rewards.sandbox.bubblewrap import write_variables
from rewards.sandbox.session import PythonSession
from unit_tests.helpers.needs_sandbox import needs_sandbox
from unit_tests.helpers.processes import leftovers, wait_until
from unit_tests.helpers.sandbox_escapes import ESCAPES, Outcome, run_escapes

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent
SYSTEM_PYTHON = "/usr/bin/python3"
SECRET = "nobody-may-see-this"


def run(source: str, *, stdin: bytes = b"", files: dict[str, bytes] | None = None, **limits: Any) -> Ran:
    command = ["python3", "main.py"]
    return asyncio.run(
        Bubblewrap().run(
            command, files={"main.py": source.encode(), **(files or {})}, stdin=stdin, limits=Limits(**limits)
        )
    )


@dataclass
class Host:
    """What this machine has, and the outcomes of all escapes."""

    secrets: dict[str, Any]
    outcomes: dict[str, Outcome]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text(SECRET)
    abstract = f"feynrl-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
        pytest.MonkeyPatch.context() as patch,
    ):
        unix.bind(f"\0{abstract}")
        unix.listen()
        patch.setenv("SECRET_TOKEN", SECRET)
        yield {
            "port": server.getsockname()[1],
            "abstract": abstract,
            "secret": SECRET,
            "files": [str(folder / "secret"), str(ROOT), str(Path.home())],
            "pid": os.getpid(),
            "mark": f"mark-{os.getpid()}",
        }


@pytest.fixture(scope="module")
def outcomes(secrets) -> dict[str, Outcome]:
    return asyncio.run(run_escapes([*ESCAPES], secrets))


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_is_contained(name, outcomes, secrets):
    assert ESCAPES[name].is_contained(outcomes[name]), outcomes[name]
    assert leftovers(secrets["mark"]) == []
    assert SECRET not in outcomes[name].stderr


@needs_sandbox
@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user, and this user is tested above")
def test_escapes_are_contained_for_an_ordinary_user_too(secrets):
    command = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", SYSTEM_PYTHON, "-P", "-B", "-m"]
    done = subprocess.run(
        [*command, "unit_tests.helpers.sandbox_escapes", *ESCAPES],
        input=json.dumps(secrets | {"mark": "another-user"}),
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "SECRET_TOKEN": SECRET},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = {name: Outcome(**told) for name, told in json.loads(done.stdout).items()}
    escaped = {name: outcome for name, outcome in outcomes.items() if not ESCAPES[name].is_contained(outcome)}
    assert not escaped
    assert leftovers("another-user") == []


@needs_sandbox
def test_what_code_does_is_told_apart():
    fine = run("import sys; print(sys.stdin.read()[::-1]); print('no', file=sys.stderr)", stdin=b"abc")
    assert (fine.exit_code, fine.stdout, fine.stderr, fine.killed_for) == (0, b"cba\n", b"no\n", None)
    assert run("raise SystemExit(7)").exit_code == 7
    assert run("import os; os.abort()").exit_code == 128 + 6
    assert run("import time; time.sleep(600)", seconds=0.5).killed_for == "time"
    assert asyncio.run(Bubblewrap().run(["no-such-program"])).exit_code == 127
    assert run(f"import sys; assert sys.version_info[:3] == {sys.version_info[:3]}").exit_code == 0


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a\0b"])
def test_names_of_files_stay_in_the_folder(name):
    with pytest.raises(ValueError, match="no name of a file"):
        run("", files={name: b""})


@needs_sandbox
def test_files_are_in_the_folder_and_may_be_changed():
    source = "print(open('data/in.txt').read()); open('data/in.txt', 'w').write('new'); open('own', 'w').write('x')"
    assert run(source, files={"data/in.txt": b"given"}).stdout == b"given\n"


HANGS = """
import asyncio
from rewards.sandbox import Bubblewrap, Limits
command = ["python3", "-c", "import time; time.sleep(600)", "orphan"]
asyncio.run(Bubblewrap().run(command, limits=Limits(seconds=600)))
"""
USERS = {"this user": [sys.executable], "another": ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]}


@needs_sandbox
@pytest.mark.parametrize("user", [*USERS][: 2 if os.getuid() == 0 else 1])
def test_a_sandbox_ends_with_the_process_that_began_it(user):
    command = [*USERS[user], *([] if user == "this user" else [SYSTEM_PYTHON]), "-B", "-c", HANGS]
    ours = subprocess.Popen(command, cwd=ROOT)
    wait_until(lambda: len(leftovers("orphan")) >= 3)  # bwrap, the first process inside, and the code
    ours.kill()
    ours.wait()
    wait_until(lambda: not leftovers("orphan"))


COLLECTS = """
import asyncio, ctypes, os
from rewards.sandbox import Bubblewrap, Limits
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
child = "import os, time\\nif os.fork() == 0: time.sleep(600)\\nprint(1)"
async def run():
    for code, limits in (("1", Limits()), (child, Limits()), ("while True: pass", Limits(seconds=0.3))):
        await Bubblewrap().run(["python3", "-c", code], limits=limits)
    starting = asyncio.create_task(Bubblewrap().open(["sleep", "600"]))
    await asyncio.sleep(0.001)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
asyncio.run(run())
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("nobody is left")
"""


@needs_sandbox
@pytest.mark.slow
def test_no_process_is_left_for_others_to_collect():
    done = subprocess.run([sys.executable, "-c", COLLECTS], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("nobody is left\n", "")


@needs_sandbox
def test_a_sandbox_is_among_the_processes_that_a_runs_guardian_ends(monkeypatch, tmp_path):
    monkeypatch.setenv(guardian.MARK, str(tmp_path))

    async def look() -> tuple[set[int], str]:
        box = await Bubblewrap().open(["sh", "-c", "cat; env"])  # it lives until `finish` closes its input
        found = guardian.find_processes(tmp_path)
        return found, (await box.finish(b"")).stdout.decode()

    found, environment = asyncio.run(look())
    assert found and guardian.MARK not in environment


@needs_sandbox
def test_a_run_that_is_cancelled_leaves_nothing():
    async def cancel() -> None:
        command = ["python3", "-c", "import time; time.sleep(600)", "cancelled"]
        task = asyncio.create_task(Bubblewrap().run(command, limits=Limits(seconds=600)))
        while len(leftovers("cancelled")) < 3:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    handles = len(os.listdir("/proc/self/fd"))
    asyncio.run(cancel())
    wait_until(lambda: not leftovers("cancelled"))
    assert len(os.listdir("/proc/self/fd")) == handles


@needs_sandbox
@pytest.mark.slow
def test_a_hundred_runs_leave_nothing():
    """Some of the code is hostile."""
    bad = (
        "import os, time\nos.fork()\nopen('x', 'w').write('y' * 10**6)\nprint('z' * 10**5, flush=True)\ntime.sleep(600)"
    )
    sources = ["print(1)", bad, "raise SystemExit(3)", "import os; os.fork(); os.setsid(); print(1)"]

    async def work() -> list[Ran]:
        places = asyncio.Semaphore(4)

        async def one(i: int) -> Ran:
            async with places:
                files = {"main.py": sources[i % 4].encode()}
                limits = Limits(seconds=0.4 if i % 4 == 1 else 60, output_bytes=10**4)
                return await Bubblewrap().run(["python3", "main.py", "one-of-many"], files=files, limits=limits)

        return await asyncio.gather(*map(one, range(100)))

    def state() -> tuple[int, set[str], set[str]]:
        return len(os.listdir("/proc/self/fd")), set(os.listdir("/tmp")), set(os.listdir("/dev/shm"))

    handles, files, shared = state()
    done = asyncio.run(work())
    assert {ran.exit_code for ran in done[::4]} == {0} and {ran.exit_code for ran in done[2::4]} == {3}
    assert {ran.killed_for for ran in done[1::4]} <= {"time", "output"}
    wait_until(lambda: not leftovers("one-of-many"))
    assert state()[0] == handles
    assert not [name for name in (state()[1] - files) | (state()[2] - shared) if "work" in name or "sandbox" in name]


@pytest.mark.parametrize("variables", [{"A": "x\0--bind\0/\0/app"}, {"A\0--share-net": ""}, {"": "1"}, {"A=B": "1"}])
def test_a_variable_that_would_be_an_option_is_refused(variables):
    with pytest.raises(SandboxUnavailable, match="has no name, or a NUL, or = in its name"):
        write_variables(variables)
    assert write_variables({"A": "1", "B": ""}) == b"--clearenv\0--setenv\0A\0001\0--setenv\0B\0\0"


def test_a_bubblewrap_without_namespaces_is_told_from_code_that_fails(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="No permissions to create"):
        run("print(1)")
    with pytest.raises(UserError, match=r"cannot make a sandbox here .*No permissions.*allow user namespaces"):
        check_sandbox("bubblewrap")


KERNEL = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's number of a processor."""
REFUSED = {
    # call: its number on x86_64 and on aarch64
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "pidfd_getfd": (438, 438)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"setns": (308, 268), "unshare": (272, 97), "add_key": (248, 217), "request_key": (249, 218)},
    **{"keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"fanotify_init": (300, 262), "init_module": (175, 105), "finit_module": (313, 273)},
    **{"delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116)},
    **{"iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None)},
    **{"personality": (135, 92), "vhangup": (153, 58), "name_to_handle_at": (303, 264)},
    **{"open_by_handle_at": (304, 265), "lookup_dcookie": (212, 18)},
}
NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags of clone() for time, mount, cgroup, uts, ipc, user, pid and net."""


def decide(program: bytes, kernel: int, number: int, first: int = 0) -> str:
    """What the kernel does with a call, as it reads the filter: allow, kill, or the name of an error."""
    at = word = 0
    while True:
        code, yes, no, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            word = {0: number, 4: kernel, 16: first}[value]
        elif code == 0x06:
            return {0x7FFF0000: "allow", 0x80000000: "kill"}.get(value) or errno.errorcode[value - 0x50000]
        else:
            at += yes if {0x15: word == value, 0x35: word >= value, 0x45: word & value}[code] else no


@pytest.mark.parametrize("machine", KERNEL)
def test_the_filter_refuses_some_calls_and_no_others(machine):
    decided = partial(decide, seccomp.make_filter(machine), KERNEL[machine])
    clone, socket_, prlimit = {"x86_64": (56, 41, 302), "aarch64": (220, 198, 261)}[machine]
    usual = {number: decided(number) for number in range(500) if number != socket_}
    refused = {numbers[[*KERNEL].index(machine)] for numbers in REFUSED.values()} - {None}
    assert {number for number, said in usual.items() if said == "EPERM"} == refused
    assert {number: said for number, said in usual.items() if said not in ("allow", "EPERM")} == {435: "ENOSYS"}
    assert decided(clone, 17) == "allow" and {decided(clone, 17 | flag) for flag in NAMESPACES} == {"EPERM"}
    assert decided(prlimit, 1) == "EPERM", "the limits of another process"
    families = {family: decided(socket_, family) for family in range(64)}
    assert {family for family, said in families.items() if said == "allow"} == {1, 2, 10}
    assert {*families.values()} == {"allow", "EAFNOSUPPORT"}
    # x32: other numbers for the same calls
    assert [decided(n) for n in (0x3FFFFFFF, 0x40000000)] == ["allow", "ENOSYS" if machine == "x86_64" else "allow"]
    assert {decide(seccomp.make_filter(machine), kernel, 0) for kernel in {*KERNEL.values()} - {KERNEL[machine]}} == {
        "kill"
    }


def test_a_processor_without_known_calls_is_refused():
    with pytest.raises(SandboxUnavailable, match="this machine is riscv64"):
        seccomp.make_filter("riscv64")


@needs_sandbox
@pytest.mark.slow
def test_a_session_remembers_and_a_piece_that_hangs_costs_its_names():
    async def talk() -> list[str]:
        session = PythonSession(Limits(seconds=1.0))
        pieces = ["x = 6", "x * 7", "print('a'); 1/0", "import os; os.system('echo b')", "while True: pass", "x"]
        try:
            said = [await session.run(piece) for piece in pieces]
            said.append(await session.run("import os; os._exit(0)"))
            return [*said, await session.run("'y' * 10**6"), await session.run("f'{1+1}'")]
        finally:
            await session.close()
            await session.close()

    empty, value, error, child, hung, gone, ended, long, last = asyncio.run(talk())
    assert (empty, value, child, last) == ("", "42\n", "b\n0\n", "'2'\n")
    assert error.startswith("a\n") and error.endswith("ZeroDivisionError: division by zero\n")
    assert "it took longer than 1 s; the next piece begins a new one" in hung
    assert "NameError: name 'x' is not defined" in gone
    assert "its process ended" in ended
    assert "bytes are left out" in long and len(long) < 21_000


@needs_sandbox
@pytest.mark.parametrize(
    ("limits", "piece", "says"),
    [
        (Limits(seconds=0.5), "while True: pass", "longer than 0.5 s"),
        (
            Limits(memory_mib=96),
            "import os, time\nfor _ in range(4):\n  if not os.fork(): x = bytearray(b'1') * (40 << 20); time.sleep(9)\n"
            "time.sleep(9)",
            "more than 96 MiB of memory",
        ),
        (
            Limits(files=9),
            "for n in range(99): open(f'/tmp/{n}', 'w')\nwhile True: pass",
            "more than 9 files",
        ),
        (Limits(), "import os; os._exit(0)", "its process ended"),
    ],
)
def test_a_session_says_which_limit_has_ended_it(limits, piece, says):
    async def talk() -> str:
        session = PythonSession(limits)
        try:
            return await session.run(piece)
        finally:
            await session.close()

    assert says in asyncio.run(talk())


@needs_sandbox
def test_a_session_returns_what_a_piece_prints():
    """All of it up to 20,000 bytes, also where JSON takes six for each; of more, the first and the last 10,000."""
    many = "".join(f"{n:06}" for n in range(10_000))
    told = {
        "print('\\0' * 19_999)": "\0" * 19_999 + "\n",
        "print(''.join(f'{n:06}' for n in range(10_000)), end='')": (
            f"{many[:10_000]}\n... 40000 bytes are left out ...\n{many[-10_000:]}"
        ),
        "import sys; print('b', file=sys.stderr); 'c'": "b\n'c'\n",
    }
    raised = {"input()": "EOFError: EOF when reading a line\n", "sys.exit(3)": "SystemExit: 3\n"}

    async def talk() -> list[str]:
        session = PythonSession(Limits())
        try:
            return [await session.run(piece) for piece in (*told, *raised)]
        finally:
            await session.close()

    said, hung = asyncio.run(talk()), asyncio.run(PythonSession(Limits(seconds=0.2)).run("while True: pass"))
    assert hung.startswith("error: the session was ended, because it took longer than 0.2 s; ")
    assert said[: len(told)] == [*told.values()]
    for piece, end in zip(said[len(told) :], raised.values(), strict=True):
        assert piece.startswith("Traceback") and piece.endswith(end)
