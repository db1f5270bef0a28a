"""Running sandbox: pipes, limits that the kernel does not enforce, and termination."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from core.timing.deadlines import SANDBOX_CHECK_TIMEOUT_S, SANDBOX_EXIT_GRACE_S, SANDBOX_POLL_S
from rewards.sandbox.base import MIB, KilledFor, Limits, Ran, SandboxUnavailable, last_line
from rewards.sandbox.usage import count_files, exceeds_memory, list_descendants, measure_folders

CHUNK = 65536
OUT_OF_TIME = 128 + signal.SIGXCPU
"""Exit code of a process that exceeded the CPU time."""


class Running:
    """Sandbox with running processes. All of them end with the process started here."""

    def __init__(
        self, process: asyncio.subprocess.Process, status: int, limits: Limits, writable: Sequence[Path] = ()
    ) -> None:
        """process: bwrap, with three pipes. status: pipe with bwrap's reports; it is closed here.

        writable: folders of this machine to which the processes write, unless they write to /tmp in memory.
        """
        self.killed_for: KilledFor | None = None
        self.limits, self._writable = limits, writable
        self._process, self._status = process, status
        self._reports = b""
        self._began = time.monotonic()
        self._inside: int | None = None
        """Pidfd of the first process inside, whose end ends all others. A process id could be reused."""
        self._stderr = bytearray()
        assert process.stdin and process.stdout and process.stderr
        self._in, self._out = process.stdin, process.stdout
        self._tasks = [
            asyncio.create_task(self._collect(process.stderr, self._stderr)),
            asyncio.create_task(self._watch()),
        ]

    async def begin(self) -> None:
        """Wait until a process inside exists and can be killed, or bwrap has ended."""
        try:
            async with asyncio.timeout(SANDBOX_CHECK_TIMEOUT_S):
                await self._read_begin()
        except TimeoutError:
            await self.close()
            raise SandboxUnavailable(f"bwrap has not begun within {SANDBOX_CHECK_TIMEOUT_S:g} s") from None
        # a command that cannot start has no process inside; finish reports bwrap's error
        if (pid := _find(self._reports, "child-pid")) is not None:
            with suppress(ProcessLookupError):
                self._inside = os.pidfd_open(pid)
        # again: the start of the sandbox does not count towards the code's time
        self._began = time.monotonic()

    async def _read_begin(self) -> None:
        """Read bwrap's first report, which has the id of the process inside; return at its end, too."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        # a blocking read would stop the event loop, which serves other sandboxes too
        os.set_blocking(self._status, False)
        loop.add_reader(self._status, ready.set)
        try:
            while b"\n" not in self._reports:
                await ready.wait()
                ready.clear()
                with suppress(BlockingIOError):
                    piece = os.read(self._status, CHUNK)
                    if not piece:
                        break
                    self._reports += piece
        finally:
            loop.remove_reader(self._status)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    async def finish(self, stdin: bytes) -> Ran:
        """Send the input, wait for the end or a limit, and return the result."""
        stdout = bytearray()
        self._tasks.append(asyncio.create_task(self._collect(self._out, stdout)))
        # concurrent with reading, or both sides could block on full pipes
        feeding = asyncio.create_task(self._feed(stdin))
        try:
            await asyncio.wait_for(self._process.wait(), max(0.0, self.limits.seconds - self.seconds))
        except TimeoutError:
            self.kill("time")
        finally:
            # the code may never have read all of its input
            feeding.cancel()
            seconds = self.seconds
            exit_code = await self.close()
        # bwrap itself failed, so no code ran
        if self.killed_for is None and exit_code is None:
            raise SandboxUnavailable(
                f"bwrap failed: {last_line(self._stderr).removeprefix('bwrap: ') or 'it was killed'}"
            )
        if exit_code == OUT_OF_TIME:  # several threads use CPU time faster than the clock
            self.killed_for = self.killed_for or "time"
        return Ran(
            exit_code=exit_code if self.killed_for is None else None,
            stdout=bytes(stdout),
            stderr=bytes(self._stderr),
            seconds=seconds,
            killed_for=self.killed_for,
        )

    async def ask(self, line: bytes, *, seconds: float) -> bytes | None:
        """Send a line and return the response line, or None if the sandbox ended or was killed."""
        try:
            self._in.write(line + b"\n")
            answer = await asyncio.wait_for(self._out.readline(), seconds)
        except TimeoutError:
            self.kill("time")
            return None
        except ValueError:  # longer than the pipe's limit
            self.kill("output")
            return None
        except ConnectionError:
            return None
        return answer if answer.endswith(b"\n") else None

    def kill(self, reason: KilledFor) -> None:
        """Kill the sandbox. The first reason counts."""
        if self._process.returncode is None:
            self.killed_for = self.killed_for or reason
            self._send_kill()

    async def close(self) -> int | None:
        """End all processes in the sandbox. Return the command's exit code if it exited by itself."""
        # -1: closed before
        if self._status < 0:
            return None
        status, self._status = self._status, -1
        self._send_kill()
        # in the order in which __init__ and finish created them
        stderr, watch, *rest = self._tasks
        # it would go on to look at a process id that may be reused
        watch.cancel()
        try:  # the pipes close with the last process that has them open
            async with asyncio.timeout(SANDBOX_EXIT_GRACE_S):
                await self._process.wait()
                await asyncio.gather(stderr, *rest)
        except TimeoutError:
            self._process.kill()
            raise SandboxUnavailable("a sandbox that was killed has not ended") from None
        finally:
            for task in self._tasks:
                task.cancel()
            self._in.close()
            if self._inside is not None:
                os.close(self._inside)
            reports = self._reports + _read_rest(status)
        return _find(reports, "exit-code")

    def _send_kill(self) -> None:
        """Kill the first process inside, and so all others. bwrap notices, and exits with nothing left to reap."""
        with suppress(ProcessLookupError):
            if self._inside is not None:
                signal.pidfd_send_signal(self._inside, signal.SIGKILL)
            # No process inside is known yet. With bwrap dies what it has started (--die-with-parent).
            elif self._process.returncode is None:
                os.kill(self._process.pid, signal.SIGKILL)

    async def _feed(self, stdin: bytes) -> None:
        with suppress(ConnectionError):  # the code may exit without reading its input
            self._in.write(stdin)
            await self._in.drain()
            self._in.close()

    async def _collect(self, stream: asyncio.StreamReader, into: bytearray) -> None:
        while chunk := await stream.read(CHUNK):
            # reading continues after the limit, so that the pipe drains
            room = self.limits.output_bytes - len(into)
            into += chunk[:room]
            if len(chunk) > room:
                self.kill("output")

    async def _watch(self) -> None:
        """Kill the sandbox if all processes together exceed the memory, the disk or the number of files."""
        # the kernel's limits are per process, and a cgroup for all of them may not be available
        await asyncio.gather(self._watch_processes(), self._watch_folders())

    async def _watch_processes(self) -> None:
        # Polling may miss a short excess. The kernel's limits per process bind all the same.
        while self.killed_for is None:
            await asyncio.sleep(SANDBOX_POLL_S)
            pids = list_descendants(self._process.pid)
            if exceeds_memory(pids, self.limits.memory_mib * MIB):
                self.kill("memory")
            if not self._writable and count_files(pids, self.limits.disk_mib * MIB) > self.limits.files:
                self.kill("files")

    async def _watch_folders(self) -> None:
        took_s = 0.0
        while self._writable and self.killed_for is None:
            # many files take long to measure: most of the time is left to other work
            await asyncio.sleep(max(SANDBOX_POLL_S, 10 * took_s))
            began = time.monotonic()
            if reason := await asyncio.to_thread(find_excess, self._writable, self.limits):
                self.kill(reason)
            took_s = time.monotonic() - began


def find_excess(folders: Sequence[Path], limits: Limits) -> KilledFor | None:
    """Return the limit that folders of this machine exceed, or None.

    Folders that cannot be read, or lie too deep, count as too many files.
    """
    try:
        size, files = measure_folders(folders)
    except OSError:
        return "files"
    if size > limits.disk_mib * MIB:
        return "disk"
    return "files" if files > limits.files else None


def _read_rest(pipe: int) -> bytes:
    """Read the rest of a pipe, and close it."""
    os.set_blocking(pipe, False)
    with os.fdopen(pipe, "rb") as file:
        return file.read() or b""


def _find(reports: bytes, what: str) -> int | None:
    """Return the number of a kind of report, or None.

    >>> _find(b'{ "child-pid": 17 }\\n{ "exit-code": 3 }\\n', "exit-code")
    3
    """
    for line in reports.splitlines():
        report = json.loads(line)
        if what in report:
            return report[what]
    return None
