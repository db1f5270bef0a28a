"""Temporary folder of a run, and the guardian (guardian.py beside this) that removes what the run leaves behind.

    /tmp/feynrl-k2x7q0pa/        mode 0700
        lock                     held while the driver or its guardian lives
        tmp/                     TMPDIR of everything that the run starts
        ray/, ray_token          see core/cluster/private_ray.py
    /dev/shm/feynrl-k2x7q0pa-*   shared memory

A folder whose lock is free has lost its owner: the next run removes it. Unix sockets allow 107 bytes for a path, so
names are short.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path
from types import TracebackType
from typing import Any

from core.cluster import guardian
from core.timing.deadlines import GUARDIAN_POLL_S, GUARDIAN_TIMEOUT_S, LEFTOVER_KILL_S

PREFIX = "feynrl-"
LONGEST_BASE = 19
"""Bytes. Up to 88 follow: a folder of ours, Ray's, its session with a time and a process id, and a socket."""


class Scratch:
    """Temporary folder of a run. `close`, or the end of this process, ends what the run has started and removes it."""

    def __init__(self, logs: Path | None = None) -> None:
        """Make the folder, let everything that this process starts use it, and start the guardian.

        logs: folder to be made for the logs of a private Ray cluster.
        """
        usual = tempfile.gettempdir()  # found once per process: this one keeps its own
        base = Path(usual if len(os.fsencode(usual)) <= LONGEST_BASE else "/tmp")
        remove_abandoned(base)
        self.folder, lock = _make_folder(base)
        (self.folder / "tmp").mkdir()
        self._guardian = _start_guardian(self.folder, logs, lock)
        os.close(lock)  # the guardian holds it too
        names = {
            guardian.MARK: str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "VLLM_RPC_BASE_PATH": str(self.folder / "tmp"),
            "SPT_NOENV": "1",  # else a process that changes its title, as Ray's and vLLM's do, overwrites its mark
            # compiled kernels are for later runs too
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", _usual_inductor_cache(usual)),
        }
        self._before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)

    def close(self) -> None:
        """End every process that still carries the mark, and remove the folder and the shared memory."""
        restore_environment(self._before)
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # it goes on by itself
            self._guardian.wait(GUARDIAN_TIMEOUT_S)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def find_scratch() -> Path | None:
    """Return the temporary folder of the run that this process belongs to, or has begun; None without one."""
    folder = os.environ.get(guardian.MARK)
    return Path(folder) if folder else None


def name_shared_memory() -> None:
    """Give the shared memory that this process makes a name that begins like the run's folder.

    vLLM's message queues are made with Python's own names, psm_ and a random number. Nobody could tell whose they are.
    """
    folder = find_scratch()
    if folder is None:
        return
    module: Any = shared_memory
    module._SHM_NAME_PREFIX = f"/{folder.name}-"
    module._SHM_SAFE_NAME_LENGTH = len(module._SHM_NAME_PREFIX) + 8


def remove_abandoned(base: Path) -> None:
    """Remove what runs have left whose driver and guardian are both gone."""
    for folder in base.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:  # somebody else's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its owner lives
            continue
        else:
            guardian.clean_up(folder, None, LEFTOVER_KILL_S)
        finally:
            os.close(lock)


def restore_environment(before: dict[str, str | None]) -> None:
    """Set variables back; None removes one."""
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _make_folder(base: Path) -> tuple[Path, int]:
    """Return a new folder and the handle that locks it. It has its final name only when it is locked."""
    new = Path(tempfile.mkdtemp(prefix=".feynrl-", dir=base))
    lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = new.with_name(new.name.removeprefix("."))
    new.rename(folder)
    return folder, lock


def _start_guardian(folder: Path, logs: Path | None, lock: int) -> subprocess.Popen[bytes]:
    arguments = [str(folder), str(logs or ""), str(os.getpid()), str(GUARDIAN_POLL_S), str(LEFTOVER_KILL_S)]
    environment = {name: value for name, value in os.environ.items() if name != guardian.MARK}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[lock],
        cwd="/",
        env=environment | {guardian.IS_GUARDIAN: "1"},
        start_new_session=True,
    )


def _usual_inductor_cache(base: str) -> str:
    """Return where torch keeps compiled kernels by default, which is below TMPDIR."""
    import getpass

    return os.path.join(base, f"torchinductor_{getpass.getuser()}")
