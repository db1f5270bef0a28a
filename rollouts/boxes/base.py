"""Interface of a box: a place with files, in which commands run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rewards.sandbox.base import Limits, Ran

LIMITS = Limits(memory_mib=2048, disk_mib=1024, file_mib=256, files=50_000, processes=128, open_files=1024)
"""Limits of a box; `seconds` is of each command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSpec:
    """Image and limits of a box."""

    image: str
    """Name with a digest; rollouts/boxes/images.py lists the forms that bubblewrap takes."""
    limits: Limits = LIMITS
    cpus: int = 1
    """Number of cores. Bubblewrap does not limit them."""
    network: bool = False
    """Allow the network."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables besides those of the image."""
    folder: str = ""
    """Working folder. "": that of the image."""


class Box(Protocol):
    """Running box."""

    broken: str
    """Reason why it takes no more commands, which a command has caused; "" for none."""

    async def run(self, command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Ran:
        """Run a command, to the end or to a limit. Raises SandboxUnavailable if the box itself fails."""
        ...

    async def put(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Replace a folder of the root ("/tests") by these files. A name that ends in "/" is an empty folder."""
        ...

    async def get(self, path: str, *, most: int) -> bytes | None:
        """Return a file's first `most` bytes. None if it is no regular file."""
        ...

    async def stop_processes(self) -> None:
        """End the processes that commands have left behind. The files stay."""
        ...

    async def close(self) -> None:
        """End all processes, and remove the files."""
        ...
