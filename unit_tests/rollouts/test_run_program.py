"""Programs of containers: bounded output and time, input, variables, and archives whatever they hold."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest

from rewards.sandbox.base import Ran, SandboxUnavailable
from rollouts.boxes import check_boxes
from rollouts.boxes.containers import read_archive, run_program, write_archive
from unit_tests.helpers.processes import leftovers, wait_until
from unit_tests.helpers.sentences import tell


def run(*words: str, seconds: float = 30.0, most: int = 9, **more: Any) -> Ran:
    return asyncio.run(run_program(words, seconds=seconds, most=most, **more))


@pytest.mark.parametrize(
    ("script", "most", "found"),
    [
        ("printf 12345", 5, (b"12345", b"", None)),
        ("printf 12345; exec sleep 30", 4, (b"1234", b"", "output")),
        ("printf 123; sleep 0.05; printf 4", 4, (b"1234", b"", None)),
        ("printf 123; sleep 0.05; printf 45; exec sleep 30", 4, (b"1234", b"", "output")),
        ("printf 12345 >&2; exec sleep 30", 4, (b"", b"1234", "output")),
        ("printf 1234 >&2; printf 567", 4, (b"567", b"1234", None)),
    ],
)
def test_each_output_of_a_program_is_bounded(script, most, found):
    ran = run("sh", "-c", script, most=most)
    assert (ran.stdout, ran.stderr, ran.killed_for) == found
    assert ran.exit_code == (None if ran.killed_for else 0) and 0.0 <= ran.seconds < 30.0


def test_a_program_has_its_input_variables_and_folder(tmp_path):
    variables = {"A": "b", "PATH": os.environ["PATH"]}
    script = 'cat; printf " $A$HERE "; pwd -P; exit 3'
    ran = run("sh", "-c", script, most=999, stdin=b"in", variables=variables, folder=str(tmp_path))
    assert (ran.stdout, ran.stderr, ran.killed_for) == (f"in b {tmp_path.resolve()}\n".encode(), b"", None)
    assert ran.exit_code == 3


def test_a_program_without_variables_of_its_own_has_those_of_this_process(monkeypatch):
    monkeypatch.setenv("FEYNRL_HERE", "here")
    assert run("sh", "-c", "printf $FEYNRL_HERE").stdout == b"here"


def test_a_program_that_closes_its_output_is_waited_for():
    ran = run("sh", "-c", "exec >&- 2>&-; sleep 0.05; exit 3")
    assert (ran.exit_code, ran.killed_for) == (3, None)


def test_a_program_that_closes_its_output_has_no_more_time_than_others():
    ran = run("sh", "-c", "exec >&- 2>&-; exec sleep 30", seconds=0.1)
    assert (ran.exit_code, ran.killed_for) == (None, "time")


def test_a_program_that_takes_too_long_keeps_what_it_printed():
    ran = run("sh", "-c", "echo a; echo b >&2; exec sleep 30", seconds=0.2)
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.killed_for) == (b"a\n", b"b\n", None, "time")


def test_a_child_that_leaves_its_group_costs_the_output(monkeypatch):
    monkeypatch.setattr("rollouts.boxes.containers.SANDBOX_EXIT_GRACE_S", 0.05)

    async def go() -> Ran:
        script = "echo a; setsid sleep 0.3 & exec sleep 30"
        ran = await run_program(["sh", "-c", script], seconds=0.1, most=9)
        await asyncio.sleep(0.3)  # until it has closed the pipes
        return ran

    ran = asyncio.run(go())
    assert (ran.stdout, ran.stderr, ran.killed_for) == (b"", b"", "time")


def test_input_that_a_program_does_not_read_is_no_error():
    ran = run("true", stdin=b"x" * 2**20)
    assert (ran.exit_code, ran.killed_for) == (0, None)


def test_a_program_that_is_cancelled_is_killed():
    async def go() -> list[str]:
        running = asyncio.create_task(run_program(["sleep", "621"], seconds=60, most=9))
        while not leftovers("621"):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return leftovers("621")

    assert asyncio.run(go()) == []


def test_nobody_reads_on_after_a_cancel_where_a_child_left_its_group(tmp_path, monkeypatch):
    monkeypatch.setattr("rollouts.boxes.containers.SANDBOX_EXIT_GRACE_S", 0.05)
    script = "setsid sh -c 'touch begun; exec sleep 622' & exec sleep 30"

    async def go() -> set[asyncio.Task[Any]]:
        running = asyncio.create_task(run_program(["sh", "-c", script], seconds=60, most=9, folder=str(tmp_path)))
        while not (tmp_path / "begun").exists() or not leftovers("622"):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for pid in leftovers("622"):
            os.kill(int(pid), signal.SIGKILL)
        while leftovers("622"):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # until the pipes are closed
        return left

    assert asyncio.run(go()) == set()


def test_a_program_that_is_cancelled_while_it_starts_is_killed(tmp_path, monkeypatch):
    """asyncio would wait for the pipes, which a child outside of its group keeps open."""
    monkeypatch.setattr("rollouts.boxes.containers.SANDBOX_EXIT_GRACE_S", 0.05)
    script = "setsid sh -c 'touch begun; exec sleep 623' & sleep 30; :"

    async def go() -> bool:
        running = asyncio.create_task(run_program(["sh", "-c", script], seconds=60, most=9, folder=str(tmp_path)))
        while not leftovers(script):
            await asyncio.sleep(0)
        # the loop stands still meanwhile, so that the program has begun and its pipes are not connected
        wait_until((tmp_path / "begun").exists)
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=10)
        for pid in leftovers("623"):
            os.kill(int(pid), signal.SIGKILL)
        return running in done and running.cancelled()

    assert asyncio.run(go())
    wait_until(lambda: not leftovers(script))


def test_a_program_that_is_not_there_cannot_be_started():
    told = tell(lambda: run("/no/such", "x"), SandboxUnavailable)
    assert told == "/no/such cannot be started: No such file or directory"


def test_a_daemon_that_does_not_answer_is_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("rollouts.boxes.containers.BOX_TIMEOUT_S", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "docker").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "docker").chmod(0o755)
    assert tell(lambda: check_boxes("docker")) == "`docker info` failed: no end after 0.2 s"


# Archives -------------------------------------------------------------------------------------------------------------


def test_an_archive_says_what_each_of_its_entries_is():
    archive = write_archive("logs", {"a/b": b"123", "c/": b""})
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = [(one.name, one.isdir(), one.mode, one.size) for one in tar]
        file = tar.extractfile("logs/a/b")
        assert file is not None and file.read() == b"123"
    folders = [(name, True, 0o777, 0) for name in ("logs", "logs/a", "logs/c")]
    assert found == [*folders, ("logs/a/b", False, 0o755, 3)]


def write_header(kind: bytes, size: int, **pax: str) -> bytes:
    entry = tarfile.TarInfo("x")
    entry.type, entry.size, entry.pax_headers = kind, size, pax
    return entry.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) + bytes(1024)


HOSTILE = {
    "a name longer than memory": write_header(tarfile.XHDTYPE, 2**70),
    "a size that is no number": write_header(tarfile.REGTYPE, 0, **{"GNU.sparse.size": "x"}),
    "a folder": write_header(tarfile.DIRTYPE, 0),
    "a pipe": write_header(tarfile.FIFOTYPE, 0),
    "a link": write_header(tarfile.SYMTYPE, 0),
    "nothing": bytes(10240),
}


@pytest.mark.parametrize("archive", HOSTILE)
def test_an_archive_without_a_file_that_can_be_read_is_none(archive):
    assert read_archive(HOSTILE[archive], most=9) is None


def test_a_file_of_an_archive_is_read_up_to_the_most_bytes(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    with tarfile.open(path := Path(tmp_path / "t"), "w") as tar:
        tar.add(tmp_path / "f", "f")
    found = [read_archive(path.read_bytes(), most=most) for most in (4, 5, 6)]
    assert found == [b"1234", b"12345", b"12345"]
