"""What the processes of a sandbox use together, as the kernel tells it to those outside."""

from __future__ import annotations

import os
from contextlib import suppress

PAGE = os.sysconf("SC_PAGE_SIZE")


def list_descendants(pid: int) -> list[int]:
    """List the processes below `pid`, without itself."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                waiting += children
    return found


def exceeds_memory(pids: list[int], limit: int) -> bool:
    """Tell whether the processes hold more than `limit` bytes, counting what they share once."""
    if sum(map(_resident, pids)) <= limit:  # counts shared pages again and again, and costs little
        return False
    return sum(map(_proportional, pids)) > limit


def count_files(pids: list[int], disk: int) -> int:
    """Count files and folders in the sandbox's /tmp, which has `disk` bytes; 0 while it is being made."""
    for pid in pids:
        with suppress(OSError):
            inside = f"/proc/{pid}/root/tmp"
            there = os.statvfs(inside)
            if there.f_blocks * there.f_frsize == disk and os.stat(inside).st_dev != os.stat("/tmp").st_dev:
                return there.f_files - there.f_ffree
    return 0


def _resident(pid: int) -> int:
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE
    return 0


def _proportional(pid: int) -> int:
    """Return the memory of a process with its share of what it has in common with others."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except PermissionError:
        return _resident(pid)
    except OSError:  # it has ended
        return 0
