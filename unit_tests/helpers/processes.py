"""Waiting for processes, and what they leave behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path


def leftovers(mark: str) -> list[str]:
    """Processes of this machine whose command holds the mark."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in command:
            found.append(pid)
    return found


def wait_until(done: Callable[[], object], within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


def find_free_port() -> int:
    """Return a port of the loopback address that nobody listened at a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
