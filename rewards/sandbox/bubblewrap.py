"""Sandbox on this machine by bubblewrap's `bwrap`: namespaces of its own, a read-only system, limits, no privileges.

Inside there are /usr, the Python of this run, a few devices and a /tmp of memory; no /etc, no /root, no /home, no
/proc, no /sys, no network and no variable of this process's environment. Files come in as memory, so that nothing is
left on the disk. Root gives up its user id before the code runs, for the limit on processes does not bind root; for
anybody else the id inside is 65534.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from core.cluster.guardian import MARK
from core.timing.deadlines import SANDBOX_CHECK_TIMEOUT_S
from rewards.sandbox.base import MIB, Limits, Ran, SandboxUnavailable, check_names
from rewards.sandbox.box import Box
from rewards.sandbox.seccomp import make_filter

WORK = "/tmp/work"
"""The folder inside that code starts in."""
PYTHON = "/python"
"""The Python of this run inside, where it is not below /usr."""
NOBODY = 65534
USER_IDS = range(61184, 65520)
"""User ids that no account has (systemd lends them to services); root takes one by chance for each run."""
_BASE: str = getattr(sys, "_base_executable", sys.executable)
"""The Python that a virtual environment was made from."""
INIT = ("sh", "-c", '"$@"; exit $?', "sh")
"""First process inside, with which all others end, and which bwrap collects. (bwrap's own would outlive bwrap and be a
zombie then, until somebody collects it, which in a container often nobody does.) It has bwrap's user, or else bwrap's
death could not kill it."""
MISSING = (
    "bubblewrap, the sandbox for code, is not installed: `apt install bubblewrap` (or `make sandbox`) installs it; "
    "code is never run without a sandbox"
)
FORBIDDEN = (
    "bubblewrap is installed and cannot make a sandbox here ({said}): allow user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1; Ubuntu: kernel.apparmor_restrict_unprivileged_userns=0; a container needs "
    "--security-opt seccomp=unconfined), update bubblewrap to 0.8, or use a sandbox on another machine (an http:// "
    "address)"
)
PROBE = "import os; os.fork() or os._exit(0); os.wait(); print(os.getuid() > 0, os.path.exists('/etc/passwd'))"


class Bubblewrap:
    """Sandbox on this machine. Runs share nothing, so that any number may be under way at once."""

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Ran:
        """Run `command` to its end or to a limit; see rewards/sandbox/base.py."""
        box = await self.open(command, files=files, limits=limits)
        return await box.finish(stdin)

    async def open(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        time_is_one_piece: bool = False,
    ) -> Box:
        """Start `command` and return its sandbox, which the caller must close.

        time_is_one_piece: the time is for a piece of a session, so the processor's time has no limit.
        """
        check_names(files := files or {})
        limits = limits or Limits()
        inside = [*INIT, *_drop_privileges(), *_set_limits(limits, cpu=not time_is_one_piece), *_name_python(command)]
        starting = asyncio.create_task(self._start(inside, files, limits))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # bwrap killed halfway would leave a process that nobody knows
            with suppress(SandboxUnavailable):
                await (await starting).close()
            raise

    async def _start(self, inside: Sequence[str], files: Mapping[str, bytes], limits: Limits) -> Box:
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxUnavailable(MISSING)
        status, reports = os.pipe()
        handed: list[int] = [reports]
        try:
            handed.append(rules := _in_memory(make_filter()))
            contents = {name: _in_memory(content) for name, content in files.items()}
            handed += contents.values()
            process = await asyncio.create_subprocess_exec(
                *[program, *_walls(limits), *_contents(contents, limits), "--json-status-fd", str(reports)],
                *["--seccomp", str(rules), "--", *inside],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=handed,
                env={name: os.environ[name] for name in (MARK,) if name in os.environ},
                cwd="/",
                limit=limits.output_bytes,
            )
        except OSError as error:
            os.close(status)
            raise SandboxUnavailable(f"bwrap cannot be started: {error.strerror or error}") from error
        except BaseException:
            os.close(status)
            raise
        finally:
            for handle in handed:
                os.close(handle)
        box = Box(process, status, limits)
        await box.begin()
        return box

    async def check(self) -> None:
        """Run a process that starts another. Raises SandboxUnavailable with the mend where that is not possible."""
        if shutil.which("bwrap") is None:
            raise SandboxUnavailable(MISSING)
        try:
            ran = await self.run(["python3", "-I", "-c", PROBE], limits=Limits(seconds=SANDBOX_CHECK_TIMEOUT_S))
        except SandboxUnavailable as error:
            raise SandboxUnavailable(FORBIDDEN.format(said=error)) from error
        if ran.stdout.split() != [b"True", b"False"]:
            said = ran.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"it printed {ran.stdout[:80]!r}"]
            raise SandboxUnavailable(FORBIDDEN.format(said=f"exit code {ran.exit_code}: {said[0][:200]}"))


def _walls(limits: Limits) -> list[str]:
    """Return the options that separate the sandbox from the machine."""
    spaces = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if os.getuid() != 0:
        user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    system = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64"):
        folder = Path("/", name)
        if folder.is_symlink():
            system += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            system += ["--ro-bind", str(folder), str(folder)]
    if _python_home() != "/usr":
        system += ["--ro-bind", _python_home(), PYTHON]
    devices = ["--perms", "0755", "--size", "65536", "--tmpfs", "/dev"]
    for name in ("null", "zero", "full", "random", "urandom"):
        devices += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    devices += ["--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"]
    disk = ["--perms", "1777", "--size", str(limits.disk_mib * MIB), "--tmpfs", "/tmp"]
    end = ["--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox"]
    return [*spaces, *user, *end, *system, *devices, *disk, "--perms", "0777", "--dir", WORK]


def _contents(files: Mapping[str, int], limits: Limits) -> list[str]:
    """Return the options that fill the folder and set the environment. files: handles by name."""
    given = [
        part for name, handle in files.items() for part in ("--perms", "0666", "--file", str(handle), f"{WORK}/{name}")
    ]
    environment = {
        "PATH": f"{PYTHON}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": WORK,
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": f"{PYTHON}/lib:/usr/local/lib",  # without /etc there is no list of libraries
        "OMP_NUM_THREADS": "1",  # libraries start one thread per core, and threads count as processes
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # the same code gets the same reward
    }
    setting = [part for name, value in environment.items() for part in ("--setenv", name, value)]
    return [*given, "--remount-ro", "/", "--chdir", WORK, "--clearenv", *setting]


def _drop_privileges() -> list[str]:
    """Return the command that gives up root; nothing for anybody else."""
    if os.getuid() != 0:
        return []
    uid = str(secrets.choice(USER_IDS))
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--no-new-privs", "--"]


def _set_limits(limits: Limits, *, cpu: bool) -> list[str]:
    """Return the command that sets what the kernel limits for each process, and for the number of them."""
    seconds = max(1, round(limits.seconds))
    values = {
        "as": (limits.memory_mib * MIB,) * 2,
        **({"cpu": (seconds, seconds + 1)} if cpu else {}),
        "fsize": (limits.file_mib * MIB,) * 2,
        "nproc": (limits.processes,) * 2,
        "nofile": (limits.open_files,) * 2,
        "core": (0, 0),
    }
    return ["prlimit", *[f"--{name}={soft}:{hard}" for name, (soft, hard) in values.items()], "--"]


def _name_python(command: Sequence[str]) -> list[str]:
    """Put the path of this run's Python, as it is inside, where the command says "python3"."""
    program, *arguments = command
    if program == "python3":
        home, inside = _python_home(), "/usr" if _python_home() == "/usr" else PYTHON
        program = inside + os.path.realpath(_BASE).removeprefix(home)
    return [program, *arguments]


def _python_home() -> str:
    """Return the folder of this run's Python; "/usr" where it is the system's."""
    home = os.path.realpath(sys.base_prefix)
    return "/usr" if home == "/usr" or home.startswith("/usr/") else home


def _in_memory(content: bytes) -> int:
    """Return the handle of a file in memory."""
    handle = os.memfd_create("sandbox")
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle
