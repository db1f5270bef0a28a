"""Interface of a box: a place with files, in which commands run."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from core.errors import UserError, quote
from rewards.sandbox.base import Limits, Ran

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WRITABLE = ("app", "home", "logs", "root", "solution", "tests", "tmp", "workspace")
"""Folders of the root to which the policy may write in every box."""
NAME = re.compile(r"[^\s=*\0]+")
"""Name of a variable."""
MOST_LINKS = 40
"""Maximum number of links on the way to a folder, as in the kernel."""
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


def check_variables(environment: Mapping[str, object], of: str) -> None:
    """Raise UserError for a variable that no process can have.

    >>> check_variables({"A": "b"}, "the image x")
    """
    for name, value in environment.items():
        # podman takes a name that ends in * for all variables of this machine that begin so
        if not NAME.fullmatch(name) or not is_text(f"{name}{value}"):
            raise UserError(
                f"{of} sets the variable {quote(name)} to {quote(str(value))}: a name may not be empty nor have "
                "=, *, spaces or NUL, and the value may have no NUL and no broken characters"
            )


def is_text(text: str) -> bool:
    """Tell whether a process can be given a text: it has neither NUL nor half of a character.

    >>> is_text("a\\n"), is_text("\\ud800"), is_text("\\0")
    (True, False, False)
    """
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def order_path(path: str, writable: Collection[str] = WRITABLE, root: Path | None = None) -> str:
    """Return a PATH in which folders that the policy may write to come last, and relative ones are left out.

    root: files of the image, whose links are followed. None: links are not known.

    >>> order_path("/app/bin:/opt/conda/bin::bin:/usr/bin:/root/x", ["app", "root"])
    '/opt/conda/bin:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin:/bin:/app/bin:/root/x'
    """
    folders = [one for one in path.split(":") if one.startswith("/")]
    is_late = {one: is_below(one, writable, root) for one in folders}
    # no program of the system may come from a later folder
    early = [one for one in folders if not is_late[one]] + PATH.split(":")
    return ":".join(dict.fromkeys([*early, *(one for one in folders if is_late[one])]))


def is_below(folder: str, writable: Collection[str], root: Path | None = None) -> bool:
    """Tell whether a path leads through a folder of `writable`, or to the root itself. Links stay within `root`.

    >>> is_below("/opt/../app/bin", ["app"]), is_below("/opt/app", ["app"])
    (True, False)
    """
    waiting, at, links = folder.split("/")[::-1], list[str](), 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            at = at[:-1]
        elif part not in ("", "."):
            if not at and part in writable:
                return True
            place = None if root is None else root.joinpath(*at, part)
            if place is None or not os.path.islink(place):
                at.append(part)
                continue
            links += 1
            if links > MOST_LINKS:
                return True
            target = os.readlink(place)
            at = [] if target.startswith("/") else at
            waiting += target.split("/")[::-1]
    return not at


class Box(Protocol):
    """Running box."""

    path: str
    """PATH of a verifier: that of image and task, but folders that the policy may write to come last."""

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
