"""Box in a container of podman, docker or apptainer, driven by the program's command line."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from core.errors import UserError, quote
from core.tasks import shield_start
from core.timing.deadlines import BOX_TIMEOUT_S, SANDBOX_EXIT_GRACE_S
from core.timing.progress import say
from rewards.sandbox.base import KilledFor, Ran, SandboxUnavailable, check_names, last_line
from rollouts.boxes.base import PATH, BoxSpec, order_path
from rollouts.boxes.programs import Program

MOST_STARTS = 4
"""Containers that this process starts at a time. A daemon with many starts at once fails some."""
LARGEST_ARCHIVE = 64 * 2**20
"""Maximum size of an archive that is read, in bytes."""
STARTING = asyncio.Semaphore(MOST_STARTS)
NO_LIMIT = (b"storage-opt", b"storage option", b"pquota", b"project quota", b"btrfs quota", b"not enabled quotas")
"""Words of the programs for storage that cannot limit the disk of a container. A quota may also be used up."""
UNLIMITED: set[str] = {"apptainer"}
"""Programs that cannot limit the disk here, as far as this process knows."""
HINTS = (b"Run 'docker ", b"See 'docker ")
"""Beginnings of the lines below docker's errors."""
GONE = ("no such container", "no container with name", "is not running", "no instance", "instance not found")
"""Words of the programs for a container that has ended."""


class ContainerBox:
    """Container with files that stay between commands.

    So do processes in the background, until a command exceeds a limit.
    """

    def __init__(self, program: Program, spec: BoxSpec) -> None:
        self.broken = ""
        self.path = order_path(spec.environment.get("PATH", PATH))
        self.name = f"feynrl-{secrets.token_hex(8)}"
        self.home = tempfile.mkdtemp(prefix="box-")
        """Working folder of the program: podman writes a file there when memory runs out."""
        self._program, self._spec = program, spec
        self._started = False

    @classmethod
    async def open(cls, program: Program, spec: BoxSpec) -> ContainerBox:
        """Start a container. Raises UserError for an image without a digest, SandboxUnavailable if it fails."""
        if not program.names_digest(spec.image):
            raise UserError(
                f"the image {quote(spec.image)} must name its digest (NAME@sha256:...), or it may be another tomorrow"
            )
        box = cls(program, spec)
        try:
            async with STARTING:
                await box._start()
            if "PATH" not in spec.environment:
                box.path = order_path(await box._find_path())
            box._started = True
        except BaseException:
            # a late start would leave it behind
            await box.close()
            raise
        return box

    async def run(self, command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Ran:
        # an instance of Apptainer forgets those of its start
        given = {**self._spec.environment, **(environment or {})}
        words = self._program.run(self.name, command, folder=self._spec.folder, environment=given)
        variables = {**os.environ, **self._program.pass_on(given)}
        most = self._spec.limits.output_bytes
        ran = await run_program(words, seconds=seconds, most=most, variables=variables, folder=self.home)
        if ran.killed_for is not None:
            # its processes would go on in the container, beside the verifier
            await self.stop_processes()
        elif ran.exit_code != 0:
            await self._check_alive()
        return ran

    async def put(self, folder: str, files: Mapping[str, bytes]) -> None:
        check_names(files)
        await self._step(self._program.remove(self.name, folder), seconds=BOX_TIMEOUT_S)
        archive = write_archive(folder.strip("/"), files)
        await self._step(self._program.put(self.name), seconds=BOX_TIMEOUT_S, stdin=archive)

    async def get(self, path: str, *, most: int) -> bytes | None:
        words = self._program.get(self.name, path)
        ran = await run_program(words, seconds=BOX_TIMEOUT_S, most=LARGEST_ARCHIVE, folder=self.home)
        if ran.exit_code != 0:
            await self._check_alive()
            return None
        return read_archive(ran.stdout, most=most)

    async def stop_processes(self) -> None:
        if not self.broken:
            await self._step(self._program.restart(self.name), seconds=BOX_TIMEOUT_S)

    async def close(self) -> None:
        try:
            await self._end()
        finally:
            shutil.rmtree(self.home, ignore_errors=True)

    async def _start(self) -> None:
        """Start the container, with a limit on the disk if the storage of this machine's program knows one."""
        name = self._program.name
        limit_disk = name not in UNLIMITED
        words, ran = await self._try_start(limit_disk=limit_disk)
        if limit_disk and ran.exit_code != 0 and any(one in ran.stderr.lower() for one in NO_LIMIT):
            reason = find_reason(ran.stderr)
            # of a refused container, the name may be left
            await self._end()
            words, ran = await self._try_start(limit_disk=False)
            # others that started meanwhile may have said it
            if ran.exit_code == 0 and name not in UNLIMITED:
                UNLIMITED.add(name)
                say(f"the disk of containers of {name} is not limited: {reason}")
        if ran.exit_code != 0:
            raise_failure(words, ran)

    async def _try_start(self, *, limit_disk: bool) -> tuple[list[str], Ran]:
        """Return the command line that starts the container, and the result."""
        program, spec = self._program, self._spec
        words = program.start(self.name, spec, limit_disk=limit_disk)
        variables = {**os.environ, **program.pass_on(spec.environment)}
        ran = await run_program(words, seconds=BOX_TIMEOUT_S, most=2**16, variables=variables, folder=self.home)
        return words, ran

    async def _find_path(self) -> str:
        """Return the PATH of the image. It is read before the policy can change the container."""
        words = self._program.run(self.name, ["sh", "-c", 'printf %s "$PATH"'], folder="/", environment={})
        ran = await run_program(words, seconds=BOX_TIMEOUT_S, most=2**16, folder=self.home)
        if ran.exit_code != 0:
            raise_failure(words, ran)
        return ran.stdout.decode(errors="replace").strip() or PATH

    async def _check_alive(self) -> None:
        """Note that the container has ended. Raises SandboxUnavailable if the program cannot tell."""
        words = self._program.look(self.name)
        ran = await run_program(words, seconds=BOX_TIMEOUT_S, most=2**16, folder=self.home)
        if ran.exit_code == 0 and ran.stdout.strip() != b"false":
            return
        said = ran.stderr.decode(errors="replace").lower()
        if ran.exit_code != 0 and not any(words in said for words in GONE):
            raise SandboxUnavailable(f"{self._program.name} failed: {find_reason(ran.stderr) or 'it said nothing'}")
        self.broken = "its container has ended"

    async def _end(self) -> None:
        for words in self._program.end(self.name):
            # one that has ended already is an error of the program, and what we want
            with suppress(SandboxUnavailable):
                await run_program(words, seconds=BOX_TIMEOUT_S, most=2**16, folder=self.home)

    async def _step(self, words: Sequence[str], *, seconds: float, stdin: bytes = b"") -> None:
        """Run a command line that must succeed, unless the container has ended."""
        ran = await run_program(words, seconds=seconds, most=2**16, stdin=stdin, folder=self.home)
        if ran.exit_code != 0 and self._started:
            await self._check_alive()
        if ran.exit_code != 0 and not self.broken:
            raise_failure(words, ran)


def raise_failure(words: Sequence[str], ran: Ran) -> NoReturn:
    why = find_reason(ran.stderr) or f"no end after {ran.seconds:.3g} s"
    raise SandboxUnavailable(f"`{words[0]} {words[1]}` failed: {why}")


def find_reason(stderr: bytes) -> str:
    """Return the last line of an error output, but for docker's hint at its help.

    >>> find_reason(b"docker: no such image\\n\\nRun 'docker run --help' for more information\\n")
    'docker: no such image'
    """
    return last_line(b"\n".join(line for line in stderr.splitlines() if not line.startswith(HINTS)))


def check_program(program: Program) -> None:
    """Raise SandboxUnavailable unless the program runs."""
    if shutil.which(program.name) is None:
        raise SandboxUnavailable(f"{program.name} is not installed: install it, or use the boxes of bubblewrap")
    # docker's `info` asks the daemon; apptainer has none, and no such command
    words = [program.name, "--version"] if program.name == "apptainer" else [program.name, "info"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=BOX_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SandboxUnavailable(f"`{' '.join(words)}` failed: no end after {BOX_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise SandboxUnavailable(f"`{' '.join(words)}` failed: {find_reason(done.stderr)}")


async def run_program(
    words: Sequence[str],
    *,
    seconds: float,
    most: int,
    stdin: bytes = b"",
    variables: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> Ran:
    """Run a program with bounded time and output. It is killed when either is exceeded, or on cancellation.

    variables, folder: None stands for those of this process.
    """
    began = time.monotonic()
    process = await start_program(words, variables, folder)
    assert process.stdin and process.stdout and process.stderr
    killed_for: list[KilledFor] = []

    def kill(reason: KilledFor) -> None:
        killed_for.append(reason)
        kill_group(process)

    async def read(stream: asyncio.StreamReader) -> bytes:
        found = bytearray()
        while piece := await stream.read(2**16):
            room = most - len(found)
            found += piece[:room]
            if len(piece) > room:
                kill("output")
                break
        return bytes(found)

    async def write(stream: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            stream.write(stdin)
            await stream.drain()
        stream.close()

    # the end too: a program may close its output and go on
    work = asyncio.gather(read(process.stdout), read(process.stderr), write(process.stdin), process.wait())
    try:
        stdout, stderr, _, _ = await asyncio.wait_for(asyncio.shield(work), seconds)
    except TimeoutError:
        kill("time")
        stdout, stderr = await finish_killed(work)
    except BaseException:
        work.cancel()
        await kill_program(process)
        raise
    return Ran(
        exit_code=None if killed_for else process.returncode,
        stdout=stdout,
        stderr=stderr,
        seconds=time.monotonic() - began,
        killed_for=killed_for[0] if killed_for else None,
    )


async def start_program(
    words: Sequence[str], variables: Mapping[str, str] | None, folder: str | None
) -> asyncio.subprocess.Process:
    """Start a program with pipes. Raises SandboxUnavailable. It is killed on cancellation."""
    pipe = asyncio.subprocess.PIPE
    try:
        return await shield_start(
            asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=variables, cwd=folder
            ),
            end=kill_program,
        )
    except OSError as error:
        raise SandboxUnavailable(f"{words[0]} cannot be started: {error.strerror or error}") from error


async def kill_program(process: asyncio.subprocess.Process) -> None:
    """Kill a program with all children, and wait for the end, but not for ever."""
    kill_group(process)
    # a child outside of its group may keep the pipes open, and asyncio waits for them
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), SANDBOX_EXIT_GRACE_S)


def kill_group(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        # its children too, which may have the pipes open
        os.killpg(process.pid, signal.SIGKILL)


async def finish_killed(work: asyncio.Future[tuple[bytes, bytes, None, int]]) -> tuple[bytes, bytes]:
    """Return the output of a killed process; nothing if its children keep the pipes open."""
    try:
        async with asyncio.timeout(SANDBOX_EXIT_GRACE_S):
            return (await work)[:2]
    except TimeoutError:
        return b"", b""


def write_archive(folder: str, files: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of files below a folder. A name that ends in "/" is an empty folder."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        # each once, and before what is in it
        for parent in sorted({folder, *(one for name in files for one in list_parents(f"{folder}/{name}"))}):
            entry = tarfile.TarInfo(parent)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        for name, content in files.items():
            if not name.endswith("/"):
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mode = len(content), 0o755
                tar.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def list_parents(name: str) -> list[str]:
    """Return the folders of a name; one that ends in "/" is a folder itself.

    >>> list_parents("tests/data/x"), list_parents("logs/verifier/")
    (['tests', 'tests/data'], ['logs', 'logs/verifier'])
    """
    parts = name.split("/")[:-1]
    return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def read_archive(archive: bytes, *, most: int) -> bytes | None:
    """Return the first `most` bytes of the only file in a tar archive; None if it holds no regular file."""
    try:
        # "r:": Apptainer's archives come from a program of the policy, and could unpack to any size
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            member = tar.next()
            file = None if member is None or not member.isreg() else tar.extractfile(member)
            return None if file is None else file.read(most)
    except (tarfile.TarError, ValueError, ArithmeticError, RecursionError, OSError):
        return None
