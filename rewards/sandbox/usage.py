"""Resource usage of a sandbox's processes, read from /proc outside."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
MOST_CLOSED = 64
"""Maximum depth of folders within each other that their owner cannot read."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Folder of this user that was opened for a moment, since the mode forbids to read it."""

    handle: int
    mode: int

    def close_again(self) -> None:
        try:
            os.chmod(f"/proc/self/fd/{self.handle}", self.mode)
        finally:
            os.close(self.handle)


def list_descendants(pid: int) -> list[int]:
    """List the descendants of `pid`, without `pid`."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):  # it has ended
            # the kernel lists a child under the thread that forked it
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                waiting += children
    return found


def exceeds_memory(pids: list[int], limit: int) -> bool:
    """Return whether the processes use more than `limit` bytes. Shared pages count once."""
    if sum(map(_resident, pids)) <= limit:  # cheap upper bound: shared pages count several times
        return False
    return sum(map(_proportional, pids)) > limit


def count_files(pids: list[int], disk: int) -> int:
    """Count files and folders in the sandbox's /tmp of `disk` bytes. Return 0 while it is being mounted."""
    for pid in pids:
        with suppress(OSError):
            inside = f"/proc/{pid}/root/tmp"
            there = os.statvfs(inside)
            # by size and device: before the mount, /tmp inside is still the machine's
            if there.f_blocks * there.f_frsize == disk and os.stat(inside).st_dev != os.stat("/tmp").st_dev:
                return there.f_files - there.f_ffree
    return 0


def measure_folders(folders: Iterable[Path]) -> tuple[int, int]:
    """Return the bytes on disk, and the number of files and folders. Links are not followed.

    Raises OSError for a folder that cannot be read: it could hide any number of files. One of this user
    that is closed to it is opened for the moment.
    """
    size = files = depth = 0
    waiting: list[str | Path | Closed] = [*folders]
    try:
        while waiting:
            path = waiting.pop()
            if isinstance(path, Closed):
                path.close_again()
                depth -= 1
                continue
            # it may be gone
            with suppress(FileNotFoundError, NotADirectoryError):
                if closed := _open_closed(path):
                    # below its entries, so it is closed again once they are counted
                    waiting.append(closed)
                    depth += 1
                    if depth > MOST_CLOSED:
                        raise PermissionError(f"more than {MOST_CLOSED} closed folders within each other")
                with os.scandir(path) as entries:
                    for entry in entries:
                        files += 1
                        with suppress(OSError):
                            size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
    finally:
        for path in reversed(waiting):
            if isinstance(path, Closed):
                path.close_again()
    return size, files


def _open_closed(path: str | Path) -> Closed | None:
    """Open a folder whose mode forbids its owner, this user, to read it. None if it can be read, or by root."""
    if os.getuid() == 0:
        return None
    handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(handle)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o500 == 0o500 or found.st_uid != os.getuid():
        os.close(handle)
        return None
    closed = Closed(handle, mode)
    try:
        os.chmod(f"/proc/self/fd/{handle}", mode | 0o700)
    except OSError:
        os.close(handle)
        raise
    return closed


def _resident(pid: int) -> int:
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE
    return 0


def _proportional(pid: int) -> int:
    """Return the proportional set size of a process: shared pages are divided among their users."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    # another user's smaps needs the right to trace, which a container may lack; the bound is then too strict
    except PermissionError:
        return _resident(pid)
    except OSError:  # it has ended
        return 0
