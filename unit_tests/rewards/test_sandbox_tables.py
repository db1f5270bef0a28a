"""Sandboxes in exact options and sentences: what bwrap is told, what files take, how a session ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.cluster.child_process import ROOT
from core.text.plain_text import escape_controls
from rewards.sandbox import Bubblewrap, Limits, SandboxUnavailable, bubblewrap
from rewards.sandbox import usage as of_files
from rewards.sandbox.base import last_line
from rewards.sandbox.bubblewrap import View, draw_user, mount_system
from rewards.sandbox.running import find_excess
from rewards.sandbox.session import PythonSession
from rewards.sandbox.usage import count_files, exceeds_memory, list_descendants, measure_folders

MIB = 2**20


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return a function that opens a sandbox, and what bwrap was told: its options, its files and its environment."""
    (tmp_path / "bwrap").write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "options = sys.argv[1:]\n"
        "at = {name: options.index(name) for name in ('--args', '--json-status-fd', '--block-fd', '--seccomp')}\n"
        "read = lambda handle: os.read(int(handle), 10**6).decode('latin1')\n"
        "files = {options[n + 2]: read(options[n + 1]) for n, one in enumerate(options) if one == '--file'}\n"
        "seen = {'args': read(options[at['--args'] + 1]), 'files': files, 'env': dict(os.environ)}\n"
        "seen['cwd'] = os.getcwd()\n"
        "seen['filter'] = len(read(options[at['--seccomp'] + 1]))\n"
        "for name, place in at.items(): options[place + 1] = 'N'\n"
        "for n, one in enumerate(options):\n"
        "    if one == '--file': options[n + 1] = 'N'\n"
        f"json.dump(seen | {{'options': options}}, open({str(tmp_path / 'told')!r}, 'w'))\n"
        "print('bwrap: no more', file=sys.stderr)\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def ask(command: list[str], *, stdin: bytes = b"", **how: Any) -> dict[str, Any]:
        async def go() -> None:
            box = await Bubblewrap().open(command, **how)
            with pytest.raises(SandboxUnavailable, match=r"^bwrap failed: no more$"):
                await box.finish(stdin)

        asyncio.run(go())
        return json.loads((tmp_path / "told").read_text())

    return ask


def limits_of(seconds: int | None, *, memory: int = 512, file: int = 32, processes: int = 32, files: int = 256):
    cpu = [] if seconds is None else [f"--cpu={seconds}:{seconds + 1}"]
    memory, file = memory * MIB, file * MIB
    return [
        *("prlimit", f"--as={memory}:{memory}", *cpu, f"--fsize={file}:{file}", f"--nproc={processes}:{processes}"),
        *(f"--nofile={files}:{files}", "--core=0:0", "--"),
    ]


DEVICES = ["--perms", "0755", "--size", "65536", "--tmpfs", "/dev"] + [
    part for name in ("null", "zero", "full", "random", "urandom") for part in ("--dev-bind", *[f"/dev/{name}"] * 2)
]
STREAMS = [
    *("--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin"),
    *("--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr"),
]
HANDLES = ["--json-status-fd", "N", "--block-fd", "N", "--args", "N", "--seccomp", "N"]


def walls_of(rest: list[str], *, network: bool = False) -> list[str]:
    names = ("ipc", "pid", "uts", "cgroup-try", *(() if network else ("net",)))
    user = ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    if os.getuid() == 0:
        user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    end = ["--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox"]
    return [*[f"--unshare-{name}" for name in names], *user, *end, *rest]


def test_bwrap_is_told_walls_files_limits_and_the_program(told, monkeypatch):
    monkeypatch.setattr(bubblewrap.secrets, "choice", lambda ids: ids[7])
    monkeypatch.setenv("SECRET", "x")
    limits = Limits(seconds=2.4, memory_mib=96, disk_mib=7, file_mib=5, processes=9, open_files=33)
    seen = told(["python3", "a.py", "b"], files={"a.py": b"print(1)", "d/e": b"\xff"}, limits=limits)
    uid = 61184 + 7
    drops = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--no-new-privs", "--"]
    options, inside = seen["options"][: seen["options"].index("--")], seen["options"][seen["options"].index("--") + 1 :]
    assert inside[:4] == ["sh", "-c", '"$@"; exit $?', "sh"]
    program = inside[4:]
    if os.getuid() == 0:
        assert program[: len(drops)] == drops
        program = program[len(drops) :]
    want = limits_of(2, memory=96, file=5, processes=9, files=33)
    assert program[: len(want)] == want
    home = os.path.realpath(sys.base_prefix)
    real = os.path.realpath(f"{sys.base_prefix}/bin/python3.{sys.version_info.minor}")
    below_usr = home.startswith("/usr/") or home == "/usr"
    assert program[len(want) :] == [real if below_usr else f"/python{real.removeprefix(home)}", "a.py", "b"]
    files = [part for name in ("a.py", "d/e") for part in ("--perms", "0666", "--file", "N", f"/tmp/work/{name}")]
    python = [] if below_usr else ["--ro-bind", home, "/python"]
    disk = ["--perms", "1777", "--size", str(7 * MIB), "--tmpfs", "/tmp", "--perms", "0777", "--dir", "/tmp/work"]
    mounts = [*mount_system(), *python, *disk]
    walls = walls_of([*mounts, *DEVICES, "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"])
    assert options == [*walls, *files, "--remount-ro", "/", "--chdir", "/tmp/work", *HANDLES]
    assert seen["files"] == {"/tmp/work/a.py": "print(1)", "/tmp/work/d/e": "\xff"}
    assert "SECRET" not in seen["env"] and seen["cwd"] == "/" and seen["filter"] % 8 == 0 and seen["filter"] > 500
    parts = seen["args"].split("\0")
    assert parts[0] == "--clearenv" and parts[1::3] == ["--setenv"] * 8 + [""]
    assert dict(zip(parts[2::3], parts[3::3], strict=True)) == {
        "PATH": "/python/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp/work",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": "/python/lib:/usr/local/lib",
        **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        **{"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
    }


def test_a_view_of_its_own_has_its_folder_network_and_user(told, tmp_path):
    view = View(
        mounts=("--bind", "/a", "/b", "--proc", "/proc"),
        folder="/box",
        environment={"A": "1", "B": ""},
        network=True,
        user=1234,
        writable=(tmp_path,),
    )
    seen = told(["python3", "x"], files={"f": b""}, view=view, time_is_one_piece=True)
    options, inside = seen["options"][: seen["options"].index("--")], seen["options"][seen["options"].index("--") + 1 :]
    assert seen["args"] == "--clearenv\0--setenv\0A\x001\0--setenv\0B\0\0"
    rest = ["--bind", "/a", "/b", "--proc", "/proc", *DEVICES, *STREAMS, "--symlink", "/tmp", "/dev/shm"]
    walls = walls_of([*rest, "--remount-ro", "/dev"], network=True)
    given = ["--perms", "0666", "--file", "N", "/box/f"]
    assert options == [*walls, *given, "--remount-ro", "/", "--chdir", "/box", *HANDLES]
    assert inside[-9:] == [*limits_of(None), "python3", "x"], "a view's own python3"
    assert (os.getuid() != 0) or "--reuid=1234" in inside
    assert 61184 <= draw_user() < 65520
    for seconds, cpu in ((0.2, 1), (1.6, 2), (10.0, 10)):
        seen = told(["x"], view=view, limits=Limits(seconds=seconds))
        assert f"--cpu={cpu}:{cpu + 1}" in seen["options"]


def test_a_machine_without_bwrap_or_with_one_that_cannot_start_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = (
        "bubblewrap, the sandbox for code, is not installed: `apt install bubblewrap` (or `make sandbox`) installs it; "
        "code is never run without a sandbox"
    )
    for call in (Bubblewrap().check(), Bubblewrap().run(["true"])):
        with pytest.raises(SandboxUnavailable) as raised:
            asyncio.run(call)
        assert str(raised.value) == missing
    (tmp_path / "bwrap").write_text("#!/no/such/interpreter\n")
    (tmp_path / "bwrap").chmod(0o755)
    handles = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxUnavailable) as raised:
        asyncio.run(Bubblewrap().run(["true"]))
    assert str(raised.value) == "bwrap cannot be started: No such file or directory"
    assert len(os.listdir("/proc/self/fd")) == handles
    for printed, said in (("", "exit code None"), ("False False", "it printed b'False False\\n'")):
        (tmp_path / "bwrap").write_text(
            f"#!{sys.executable}\nimport os, sys\nat = sys.argv.index('--json-status-fd')\n"
            f"os.write(int(sys.argv[at + 1]), b'{{\"exit-code\": 3}}\\n')\nprint({printed!r})\n"
        )
        with pytest.raises(
            SandboxUnavailable, match=r"^bubblewrap is installed and cannot make a sandbox here"
        ) as raised:
            asyncio.run(Bubblewrap().check())
        assert (said if printed else "exit code 3: it printed b'\\n'") in str(raised.value)


def test_a_variable_that_is_refused_leaves_no_handle_open(told):
    handles = len(os.listdir("/proc/self/fd"))
    view = View(mounts=(), folder="/", environment={"A=B": "1"})
    with pytest.raises(SandboxUnavailable, match=r"^the variable .* has no name, or a NUL, or = in its name$"):
        asyncio.run(Bubblewrap().open(["true"], files={"f": b"x"}, view=view))
    assert len(os.listdir("/proc/self/fd")) == handles


# Files and processes ------------------------------------------------------------------------------------------


def test_files_are_measured_on_the_disk_without_their_links(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"x" * 10_000)
    (tmp_path / "a" / "b" / "two").write_bytes(b"x" * 5000)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    blocks = sum(path.lstat().st_blocks * 512 for path in tmp_path.rglob("*"))
    assert measure_folders([tmp_path]) == (blocks, 5)
    assert measure_folders([tmp_path / "a" / "b", tmp_path / "none", tmp_path / "a" / "one"])[1] == 1
    size, _ = measure_folders([tmp_path])
    for more, found in (({"disk_mib": 0}, "disk"), ({"files": 4}, "files"), ({"files": 5}, None), ({}, None)):
        assert find_excess([tmp_path], Limits(**more)) == found
    assert size > 10_000


AS_A_USER = """
import os, stat, sys
from rewards.sandbox.usage import measure_folders

def look(*folders, more=()):
    try:
        size, files = measure_folders([*folders, *more])
        print(size - blocks, files)
    except PermissionError as error:
        print(error)
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in folders]
    print(*map(oct, modes), len(os.listdir("/proc/self/fd")) - before)

os.chdir(sys.argv[1])  # a path of one name needs no right to the folders above
before = len(os.listdir("/proc/self/fd"))
if os.getuid() == 0:  # root may read every folder
    os.chown(".", 65534, 65534)
    os.mkdir("of_root", 0)
    os.setgid(65534)
    os.setuid(65534)
os.makedirs("shut/below")
os.makedirs("open")
open("shut/below/one", "w").write("x" * 10_000)
open("open/two", "w").write("x")
blocks = sum(os.stat(path).st_blocks * 512 for path in ("shut/below", "shut/below/one", "open/two"))
os.chmod("shut/below", 0o010)
os.chmod("shut", 0o300)
look("shut", "open", more=["none", "open/two"])
wide = [f"wide/{n}" for n in range(65)]
os.mkdir("wide")
for path in wide:
    os.mkdir(path, 0)
for depth, name in ((64, "deep"), (65, "deeper")):
    levels = [name + "/d" * n for n in range(depth)]
    os.makedirs(levels[-1])
    blocks = sum(os.stat(path).st_blocks * 512 for path in levels[1:])
    for path in reversed(levels):
        os.chmod(path, 0)
    look(name, more=wide)  # of which no one is within another
    for path in levels:
        os.chmod(path, 0o700)
if os.path.exists("of_root"):
    look("of_root")
"""


def test_a_folder_that_a_program_has_closed_is_opened_for_the_moment(tmp_path):
    """By a user who is not root: a program in a sandbox could hide its files so."""
    told = subprocess.run([sys.executable, "-c", AS_A_USER, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.splitlines() == [
        *("0 3", "0o300 0o755 0"),
        *("0 63", "0o0 0"),
        *("more than 64 closed folders within each other", "0o0 0"),
        *(("[Errno 13] Permission denied: 'of_root'", "0o0 0") if os.getuid() == 0 else ()),
    ], told.stderr


def test_a_folder_that_cannot_be_read_counts_as_too_many_files(tmp_path, monkeypatch):
    def refuse(path: Any) -> None:
        raise PermissionError("closed")

    monkeypatch.setattr(of_files, "_open_closed", refuse)
    assert find_excess([tmp_path], Limits()) == "files"


def test_processes_are_found_by_their_threads_and_weighed_by_their_share():
    own, above = [os.getpid()], os.getppid()
    assert os.getpid() in list_descendants(above) and above not in list_descendants(above)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert not exceeds_memory(own, 2 * resident) and exceeds_memory(own, MIB) and not exceeds_memory([], 0)
    assert not exceeds_memory([2**22 + 1], 0), "a process that has ended"
    assert exceeds_memory([*own, 2**22 + 1], MIB), "one that ended between both looks"
    assert list_descendants(2**22 + 1) == [] and count_files([2**22 + 1], 1) == 0
    there = os.statvfs("/tmp")
    assert count_files(own, there.f_blocks * there.f_frsize) == 0, "this machine's own /tmp"


@pytest.mark.parametrize(
    ("stderr", "line"),
    [(b"", ""), (b"\n \n", ""), (b"a\nb\n\n", "b"), (b"x" * 301, "x" * 300), (b"\xff", "\ufffd")],
)
def test_the_last_line_of_an_error_output_is_short(stderr, line):
    assert last_line(stderr) == last_line(bytearray(stderr)) == line == escape_controls(line)


# A session ----------------------------------------------------------------------------------------------------


class Box:
    """Running sandbox that answers as it is told, or is killed for a limit."""

    def __init__(self, answers: list[Any], killed_for: str | None = None) -> None:
        self.answers, self.killed_for, self.closed, self.asked = answers, killed_for, 0, list[Any]()

    async def ask(self, line: bytes, *, seconds: float) -> bytes | None:
        self.asked.append((line, seconds))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("killed_for", "why"),
    [
        ("time", "it took longer than 1.5 s"),
        ("memory", "it took more than 96 MiB of memory"),
        ("files", "it made more than 7 files"),
        ("output", "it printed too much"),
        (None, "its process ended"),
    ],
)
@pytest.mark.parametrize("answer", [None, b"", b"no JSON", b"{}", b"[]", b"3", b"[" * 5000])
def test_a_session_that_ends_says_why_and_begins_anew(killed_for, why, answer, monkeypatch):
    boxes = [Box([b'{"output": "1\\n"}', answer], killed_for), Box([b'{"output": 2}'])]
    opened: list[Any] = []

    async def open_box(self: Any, command: list[str], **how: Any) -> Box:
        opened.append((command, how))
        return boxes[len(opened) - 1]

    monkeypatch.setattr(Bubblewrap, "open", open_box)
    limits = Limits(seconds=1.5, memory_mib=96, files=7)

    async def talk() -> list[str]:
        session = PythonSession(limits)
        said = [await session.run(piece) for piece in ("a", "b", "c")]
        await session.close()
        await session.close()
        return said

    ended = f"error: the session was ended, because {why}; the next piece begins a new one without its names"
    assert asyncio.run(talk()) == ["1\n", ended, "2"]
    assert [box.closed for box in boxes] == [1, 1]
    assert boxes[0].asked == [(b'{"source": "a"}', 1.5), (b'{"source": "b"}', 1.5)]
    [(command, how), _] = opened
    assert command == ["python3", "cells.py"] and how["limits"] is limits and how["time_is_one_piece"] is True
    assert [*how["files"]] == ["cells.py"] and b"def run_cell" in how["files"]["cells.py"]


def test_a_session_whose_call_is_cancelled_is_closed(monkeypatch):
    box = Box([asyncio.CancelledError()])

    async def open_box(self: Any, *_: Any, **__: Any) -> Box:
        return box

    monkeypatch.setattr(Bubblewrap, "open", open_box)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(PythonSession().run("a"))
    assert box.closed == 1


def test_a_run_to_the_end_is_opened_as_a_session_is(told, tmp_path, monkeypatch):
    monkeypatch.setattr(bubblewrap.secrets, "choice", lambda ids: ids[7])
    given = {"files": {"a.py": b"print(1)"}, "limits": Limits(seconds=2.4, memory_mib=96, processes=9)}
    opened = told(["python3", "a.py"], **given)
    with pytest.raises(SandboxUnavailable, match=r"^bwrap failed: no more$"):
        asyncio.run(Bubblewrap().run(["python3", "a.py"], **given))
    assert json.loads((tmp_path / "told").read_text()) == opened
