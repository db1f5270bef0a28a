"""Sandbox interface: limits, results and errors of untrusted code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, Protocol

from core.errors import Unavailable

KilledFor = Literal["time", "memory", "output", "files", "disk"]
MIB = 2**20


class SandboxUnavailable(Unavailable):
    """Error of the sandbox itself: not installed, not permitted, or unreachable. No code was judged.

    Rewards let it propagate, so that the sample fails instead of counting as wrong.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run. The kernel refuses an excess, or the whole sandbox is killed."""

    seconds: float = 10.0
    """Wall-clock time, and CPU time of each process, in seconds."""
    memory_mib: int = 512
    """Memory of all processes together, and address space of each."""
    disk_mib: int = 64
    """Size of /tmp, the only writable folder, which is in memory. Of a box: of all files that it has written."""
    file_mib: int = 32
    """Maximum size of a file."""
    files: int = 10_000
    """Maximum number of files and folders there."""
    processes: int = 32
    """Maximum number of processes and threads."""
    open_files: int = 256
    """Maximum number of open files per process."""
    output_bytes: int = MIB
    """Maximum size of stdout, and of stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Result of one run."""

    exit_code: int | None
    """Exit code, or 128 + n for a process killed by signal n. None if `killed_for` is set."""
    stdout: bytes
    stderr: bytes
    seconds: float
    killed_for: KilledFor | None
    """Limit for which the sandbox was killed."""


class Sandbox(Protocol):
    """Interface of a sandbox."""

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Ran:
        """Run `command` in a new folder with `files`. "python3" is this run's Python, without its packages.

        Raises SandboxUnavailable if the sandbox fails. Failures of the code are part of the result.
        """
        ...

    async def check(self) -> None:
        """Run a harmless command. Raises SandboxUnavailable, with the fix, if code cannot run."""
        ...


def check_names(files: Mapping[str, bytes]) -> None:
    """Raise ValueError for a file outside the sandbox's folder.

    >>> check_names({"data/in.txt": b""})
    >>> check_names({"../in.txt": b""})
    Traceback (most recent call last):
    ValueError: '../in.txt' is no name of a file in the sandbox's folder
    """
    for name in files:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(f"{name!r:.200} is no name of a file in the sandbox's folder")


def last_line(stderr: bytes | bytearray) -> str:
    """Return the last line of an error output, at most 300 characters; "" if there is none."""
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
