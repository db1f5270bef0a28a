"""Running sandbox with a shell in place of bwrap: what it returns, and for which limit it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rewards.sandbox import Limits, Ran, SandboxUnavailable, running
from rewards.sandbox.running import Running

T = TypeVar("T")


def play(
    shell: str,
    use: Callable[[Running], Awaitable[T]],
    *,
    reports: str = "",
    writable: tuple[Path, ...] = (),
    started_s: float = 0.0,
    **limits: Any,
) -> tuple[T, Running]:
    """Use a sandbox whose program is a shell. reports: what bwrap says; {pid} is that of the shell.

    started_s: seconds that bwrap seems to have taken to start.
    """

    async def go() -> tuple[T, Running]:
        pipe = asyncio.subprocess.PIPE
        given = Limits(**limits)
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", shell, stdin=pipe, stdout=pipe, stderr=pipe, limit=given.output_bytes
        )
        status, told = os.pipe()
        os.write(told, reports.replace("{pid}", str(process.pid)).encode())
        os.close(told)
        box = Running(process, status, given, writable)
        box._began -= started_s
        await box.begin()
        return await use(box), box

    return asyncio.run(go())


def finish(stdin: bytes = b"") -> Callable[[Running], Awaitable[Ran]]:
    return lambda box: box.finish(stdin)


def exits(code: int) -> str:
    return f'{{"other": 1}}\n{{"exit-code": {code}}}\n'


BEGUN = '{"child-pid": {pid}}\n'


@pytest.mark.parametrize(
    ("shell", "reports", "limits", "found"),
    [
        ("cat; echo no >&2", exits(0), {}, (0, b"in", b"no\n", None)),
        ("exit 3", exits(3), {}, (3, b"", b"", None)),
        ("exit 1", exits(128 + signal.SIGXCPU), {}, (None, b"", b"", "time")),
        ("printf 12345", exits(0), {"output_bytes": 5}, (0, b"12345", b"", None)),
        ("printf 123456; exec sleep 9", BEGUN, {"output_bytes": 5}, (None, b"12345", b"", "output")),
        ("printf 123456 >&2; exec sleep 9", BEGUN, {"output_bytes": 5}, (None, b"", b"12345", "output")),
        ("printf 1; exec sleep 9", BEGUN, {"seconds": 0.1}, (None, b"1", b"", "time")),
        ("exec sleep 9", "", {"seconds": 0.1}, (None, b"", b"", "time")),
    ],
)
def test_a_run_is_its_output_and_exit_code_or_the_limit_that_ended_it(shell, reports, limits, found):
    ran, box = play(shell, finish(b"in"), reports=reports, **limits)
    assert (ran.exit_code, ran.stdout, ran.stderr, ran.killed_for) == found
    assert 0 <= ran.seconds < 9 and box.killed_for == ran.killed_for
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(box._inside if box._inside is not None else -1)


@pytest.mark.parametrize(("shell", "says"), [("echo 'bwrap: no room' >&2", "no room"), ("true", "it was killed")])
def test_a_bwrap_that_reports_nothing_has_failed(shell, says):
    with pytest.raises(SandboxUnavailable) as raised:
        play(shell, finish())
    assert str(raised.value) == f"bwrap failed: {says}"


def test_a_bwrap_that_does_not_begin_is_given_up(monkeypatch):
    monkeypatch.setattr(running, "SANDBOX_CHECK_TIMEOUT_S", 0.05)

    async def go() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("/bin/sleep", "9", stdin=pipe, stdout=pipe, stderr=pipe)
        status, told = os.pipe()
        with pytest.raises(SandboxUnavailable) as raised:
            await Running(process, status, Limits()).begin()
        assert str(raised.value) == "bwrap has not begun within 0.05 s" and process.returncode == -9
        os.close(told)

    asyncio.run(go())


def test_a_sandbox_that_does_not_end_is_given_up_with_all_its_tasks(monkeypatch):
    monkeypatch.setattr(running, "SANDBOX_EXIT_GRACE_S", 0.05)

    async def go() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("/bin/sleep", "9", stdin=pipe, stdout=pipe, stderr=pipe)
        # killed in place of the other, which goes on
        inside = await asyncio.create_subprocess_exec("/bin/sleep", "9")
        status, told = os.pipe()
        os.write(told, BEGUN.replace("{pid}", str(inside.pid)).encode())
        os.close(told)
        box = Running(process, status, Limits())
        await box.begin()
        with pytest.raises(SandboxUnavailable, match=r"^a sandbox that was killed has not ended$"):
            await box.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert all(task.cancelling() for task in left)
        assert [await process.wait(), await inside.wait()] == [-signal.SIGKILL] * 2

    asyncio.run(go())


@pytest.mark.parametrize(
    ("shell", "answer", "killed_for"),
    [
        ("read line; echo $line.", b"ask.\n", None),
        ("read line; printf x", None, None),
        ("read line; printf 123456789; exec sleep 9", None, "output"),
        ("exec sleep 9", None, "time"),
    ],
)
def test_a_line_is_answered_by_a_line_or_by_nothing(shell, answer, killed_for):
    async def ask(box: Running) -> bytes | None:
        found = await box.ask(b"ask", seconds=0.2 if "sleep" in shell else 9.0)
        await box.close()
        assert await box.close() is None
        return found

    found, box = play(shell, ask, reports=BEGUN, output_bytes=4 if "123" in shell else 99)
    assert (found, box.killed_for) == (answer, killed_for)


@pytest.mark.parametrize(
    ("limits", "reason"), [({"memory_mib": 0}, "memory"), ({"files": 1}, "files"), ({"disk_mib": 0}, "disk")]
)
def test_a_sandbox_that_exceeds_a_limit_of_all_processes_is_killed(limits, reason, tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(b"x" * 10_000)
    folders = () if reason == "memory" else (tmp_path,)
    # a child that holds no pipe, since the first process is bwrap, with which the processes of a sandbox end
    shell = "sleep 3 </dev/null >/dev/null 2>&1" if reason == "memory" else "exec sleep 9"
    ran, _ = play(shell, finish(), reports=BEGUN, writable=folders, **limits)
    assert (ran.killed_for, ran.exit_code) == (reason, None) and ran.seconds < 3


def test_the_start_of_a_sandbox_does_not_count_towards_the_time_of_a_run():
    ran, _ = play("cat", finish(b"in"), reports=exits(0), started_s=3600, seconds=1800)
    assert (ran.stdout, ran.exit_code, ran.killed_for) == (b"in", 0, None) and ran.seconds < 1800


def test_what_was_asked_before_counts_towards_the_time_of_a_run():
    async def finish_late(box: Running) -> Ran:
        box._began -= 3600  # as if lines had been answered for an hour
        return await box.finish(b"")

    ran, _ = play("exec sleep 3", finish_late, reports=BEGUN, seconds=1800)
    assert (ran.killed_for, ran.exit_code) == ("time", None) and ran.seconds >= 3600


def test_the_first_reason_counts_and_an_ended_sandbox_has_none():
    async def kill_twice(box: Running) -> Ran:
        box.kill("memory")
        box.kill("disk")
        return await box.finish(b"")

    assert play("exec sleep 9", kill_twice, reports=BEGUN)[0].killed_for == "memory"

    async def kill_late(box: Running) -> Ran:
        ran = await box.finish(b"")
        box.kill("disk")
        return ran

    ran, box = play("exit 2", kill_late, reports=exits(2))
    assert ran.exit_code == 2 and box.killed_for is None
