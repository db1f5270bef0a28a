"""Guardian of a run: python -I -S core/cluster/guardian.py FOLDER LOGS DRIVER POLL_S KILL_S

It waits until the driver ends or closes the pipe to the guardian's standard input. Then it kills every process with the
run's mark in its environment, keeps Ray's logs, and removes the run's temporary folder and shared memory. It has its
own session and imports only the standard library, so that nothing that kills the run kills it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "FEYNRL_SCRATCH"
"""Environment variable with the run's temporary folder, inherited by all processes of the run."""
IS_GUARDIAN = "FEYNRL_GUARDIAN"
"""Environment variable of guardians. No guardian kills another."""
SHARED_MEMORY = Path("/dev/shm")
NAMED_BY_VLLM = "vllm_dist_*"
"""Files in the temporary folder. Shared memory of vLLM's CPU ranks has the same names."""
LOGS_OF_RAY = "ray/session_2*/logs/*"


def main(folder: str, logs: str, driver: str, poll_s: str, kill_s: str) -> None:
    """Wait for the end of the driver, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what ends a run must not end its guardian first
        signal.signal(number, signal.SIG_IGN)
    # Both are watched: a forked child of the driver may hold the pipe open after the driver's death.
    while not select.select([0], [], [], float(poll_s))[0] and os.getppid() == int(driver):
        pass
    clean_up(Path(folder), Path(logs) if logs else None, float(kill_s))


def clean_up(folder: Path, logs: Path | None, kill_s: float) -> None:
    """Kill the processes of a run; remove its folder and shared memory. logs: folder for Ray's logs."""
    # Repeated, because a process may start another between the search and its own death.
    until = time.monotonic() + kill_s
    while (found := find_processes(folder)) and time.monotonic() < until:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # a killed process needs a moment
    if logs is not None and logs.parent.is_dir():
        with suppress(OSError):  # a full disk must not keep the rest from being removed
            keep_logs(folder, logs)
    for path in list_shared_memory(folder):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def find_processes(folder: Path) -> set[int]:
    """Return the processes of a run: those with its mark in the environment, and all descendants."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    spared = {os.getpid()}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            # The command's name, in brackets, may contain spaces and brackets: read from the last bracket on.
            state, parent = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            )
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        if state in "ZX":  # it has ended
            continue
        parents[pid] = int(parent)
        if f"{MARK}={folder}".encode() in environment:
            marked.add(pid)
        if any(entry.startswith(f"{IS_GUARDIAN}=".encode()) for entry in environment):
            spared.add(pid)
    size = 0
    # A sandbox or an agent may start with a cleared environment, so descendants count too. Repeat until none is new.
    while len(marked) > size:
        size = len(marked)
        marked |= {pid for pid, parent in parents.items() if parent in marked}
    return marked - spared


def keep_logs(folder: Path, logs: Path) -> None:
    """Copy the non-empty logs of a private Ray cluster."""
    for file in folder.glob(LOGS_OF_RAY):
        if file.is_file() and not file.is_symlink() and file.stat().st_size:
            logs.mkdir(exist_ok=True)
            shutil.copyfile(file, logs / file.name)


def list_shared_memory(folder: Path) -> list[Path]:
    """List the run's files in shared memory, which has no folders: names identify the owner."""
    names = [f"{folder.name}-", *(path.name for path in folder.glob(f"tmp/{NAMED_BY_VLLM}"))]
    return [path for name in names for path in SHARED_MEMORY.glob(f"{name}*")]


if __name__ == "__main__":
    main(*sys.argv[1:])
