"""Code that nobody has read: what every sandbox takes and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, Protocol

KilledFor = Literal["time", "memory", "output", "files"]
MIB = 2**20


class SandboxUnavailable(Exception):
    """Error of the sandbox itself: it is not installed, not allowed here, or out of reach. No code was judged.

    A reward lets it pass, so that the sample fails instead of being called wrong.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one run. What reaches one is refused by the kernel, or the whole sandbox is killed."""

    seconds: float = 10.0
    """Time on the clock, and of the processor for each process."""
    memory_mib: int = 512
    """Memory of all processes together; none of them may reserve more for itself."""
    disk_mib: int = 64
    """Size of /tmp, which is memory and the only place to write to."""
    file_mib: int = 32
    """Size of one file."""
    files: int = 10_000
    """Number of files and folders in /tmp."""
    processes: int = 32
    """Number of processes and threads."""
    open_files: int = 256
    """Number of open files of each process."""
    output_bytes: int = MIB
    """Size of stdout, and of stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Outcome of one run."""

    exit_code: int | None
    """Exit code, with 128 + n for a process that signal n ended; None where `killed_for` says why there is none."""
    stdout: bytes
    stderr: bytes
    seconds: float
    killed_for: KilledFor | None
    """Limit for which the sandbox was killed."""


class Sandbox(Protocol):
    """Interface of a place to run code in."""

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Ran:
        """Run `command` in a new folder with `files`. "python3" is the Python of this run, without its packages.

        Raises SandboxUnavailable where the sandbox fails; whatever the code does is a Ran.
        """
        ...

    async def check(self) -> None:
        """Run something harmless. Raises SandboxUnavailable with the mend where code cannot be run."""
        ...


def check_names(files: Mapping[str, bytes]) -> None:
    """Raise ValueError for a file that would lie outside its folder.

    >>> check_names({"data/in.txt": b""})
    >>> check_names({"../in.txt": b""})
    Traceback (most recent call last):
    ValueError: '../in.txt' is no name of a file in the sandbox's folder
    """
    for name in files:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(f"{name!r:.200} is no name of a file in the sandbox's folder")
