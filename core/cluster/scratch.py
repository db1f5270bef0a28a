"""Temporary folder of a run, and the guardian process (guardian.py) that cleans up after the run.

    /tmp/feynrl-k2x7q0pa/        mode 0700
        lock                     locked while the driver or its guardian lives
        tmp/                     TMPDIR of everything that the run starts
        ray/, ray_token          see core/cluster/private_ray.py
    /dev/shm/feynrl-k2x7q0pa-*   shared memory

A folder without a locked `lock` is abandoned, and the next run removes it. Names are short because the path of a Unix
socket may have at most 107 bytes.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from core.cluster import guardian
from core.patches import begin_shared_memory_names
from core.timing.deadlines import GUARDIAN_POLL_S, GUARDIAN_TIMEOUT_S, LEFTOVER_KILL_S

PREFIX = "feynrl-"
LONGEST_BASE = 19
"""Bytes. Up to 88 follow: our folder, Ray's, its session with a time and a process id, and a socket."""


class Scratch:
    """Temporary folder of a run. `close`, or the end of this process, kills the run's processes and deletes it."""

    def __init__(self, logs: Path | None = None) -> None:
        """Create the folder, set it as TMPDIR of child processes, and start the guardian.

        logs: folder to create for the logs of a private Ray cluster.
        """
        usual = tempfile.gettempdir()  # found once per process: this one keeps its own
        base = Path(usual if len(os.fsencode(usual)) <= LONGEST_BASE else "/tmp")
        remove_abandoned(base)
        self.folder, lock = _make_folder(base)
        (self.folder / "tmp").mkdir()
        self._guardian = _start_guardian(self.folder, logs, lock)
        # The lock belongs to the open file, which the guardian inherited; it stays until the guardian ends.
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
        """Kill every process that still carries the mark; remove the folder and the shared memory."""
        restore_environment(self._before)
        assert self._guardian.stdin is not None
        # The guardian reads the end of this pipe as the end of the run, also after a crash of the driver.
        self._guardian.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # it goes on by itself
            self._guardian.wait(GUARDIAN_TIMEOUT_S)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_scratch() -> Path | None:
    """Return the temporary folder of this process's run, or None outside a run."""
    folder = os.environ.get(guardian.MARK)
    return Path(folder) if folder else None


def name_shared_memory() -> None:
    """Prefix new shared memory of this process with the name of the run's folder.

    vLLM's message queues use Python's default names (psm_ and a random number), which identify no owner.
    """
    if (folder := find_scratch()) is not None:
        begin_shared_memory_names(f"{folder.name}-")


def remove_abandoned(base: Path) -> None:
    """Remove folders of runs whose driver and guardian have both ended."""
    for folder in base.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:  # somebody else's
            continue
        try:
            # The kernel frees a lock with the last process that has the file open, however that process ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its owner lives
            continue
        else:
            guardian.clean_up(folder, None, LEFTOVER_KILL_S)
        finally:
            os.close(lock)


def restore_environment(before: dict[str, str | None]) -> None:
    """Restore environment variables; None deletes a variable."""
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _make_folder(base: Path) -> tuple[Path, int]:
    """Create a folder and return it with its lock's handle. It gets the final name only after it is locked."""
    new = Path(tempfile.mkdtemp(prefix=".feynrl-", dir=base))
    lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Another run that starts now looks for the prefix, and must never see the folder unlocked.
    folder = new.with_name(new.name.removeprefix("."))
    new.rename(folder)
    return folder, lock


def _start_guardian(folder: Path, logs: Path | None, lock: int) -> subprocess.Popen[bytes]:
    arguments = [str(folder), str(logs or ""), str(os.getpid()), str(GUARDIAN_POLL_S), str(LEFTOVER_KILL_S)]
    environment = {name: value for name, value in os.environ.items() if name != guardian.MARK}
    # -I -S: only the standard library, so that no setting or package of the user's keeps it from starting. New session:
    # what a terminal sends to the run does not reach it.
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
    """Return torch's default folder for compiled kernels, which depends on TMPDIR."""
    import getpass

    return os.path.join(base, f"torchinductor_{getpass.getuser()}")
