"""Sandbox on this machine with bubblewrap (`bwrap`): new namespaces, read-only system, limits, no privileges.

Inside are /usr, the Python of this run, a few devices, and a /tmp in memory. There is no /etc, /root, /home, /proc or
/sys, no network, and no environment variable of this process. Files are passed in memory, so nothing remains on disk.
Root switches to another user id before the code runs, since the limit on processes does not bind root. For other users,
the id inside is 65534.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from core.cluster.guardian import MARK
from core.errors import quote
from core.tasks import shield_start
from core.timing.deadlines import SANDBOX_CHECK_TIMEOUT_S
from rewards.sandbox.base import MIB, Limits, Ran, SandboxUnavailable, check_names, last_line
from rewards.sandbox.running import Running
from rewards.sandbox.seccomp import make_filter

WORK = "/tmp/work"
"""Working folder inside the sandbox."""
PYTHON = "/python"
"""Path of this run's Python inside, unless it is below /usr."""
# The usual id of the user nobody.
NOBODY = 65534
USER_IDS = range(61184, 65520)
"""Unused user ids (systemd assigns them to services). Root draws one at random for each run."""
_BASE = os.path.join(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
"""Base Python of a virtual environment."""
INIT = ("sh", "-c", '"$@"; exit $?', "sh")
"""First process inside. All others end with it, and bwrap reaps it. bwrap's own would outlive bwrap as a zombie; in a
container, often nobody reaps those. It runs as bwrap's user, or the death of bwrap could not kill it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Files, variables and network that the processes of a sandbox see."""

    mounts: tuple[str, ...]
    """Options of bwrap for everything but the devices."""
    folder: str
    """Working folder."""
    environment: Mapping[str, str]
    network: bool = False
    """True: the network of this machine, its own addresses included."""
    user: int | None = None
    """User id if root starts the sandbox. None: one drawn at random."""
    writable: tuple[Path, ...] = ()
    """Folders of this machine to which the processes write. Their size is watched."""


class Bubblewrap:
    """Sandbox on this machine. Runs share nothing, so any number may be concurrent."""

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Ran:
        """Run `command` to the end or to a limit; see rewards/sandbox/base.py."""
        box = await self.open(command, files=files, limits=limits)
        return await box.finish(stdin)

    async def open(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        time_is_one_piece: bool = False,
        view: View | None = None,
    ) -> Running:
        """Start `command` and return the running sandbox. The caller must close it.

        time_is_one_piece: the time limit applies to each piece of a session, so CPU time is unlimited. view: None
        stands for this machine's /usr, and a /tmp in memory.
        """
        check_names(files := files or {})
        limits = limits or Limits()
        if view is None:
            view, command = _make_default_view(limits), _name_python(command)
        # each command starts the next: the init, the loss of root, the limits, and last the program
        inside = [*INIT, *_drop_privileges(view.user), *_set_limits(limits, cpu=not time_is_one_piece), *command]
        # killing bwrap during its start could leave an unknown process
        return await shield_start(self._start(inside, files, limits, view), end=Running.close)

    async def _start(self, inside: Sequence[str], files: Mapping[str, bytes], limits: Limits, view: View) -> Running:
        """Start bwrap; return when the code inside can be killed. Raises SandboxUnavailable."""
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxUnavailable(MISSING)
        # bwrap writes the id of the first process inside, and its exit code, into this pipe
        status, reports = os.pipe()
        # the program waits for the end of this pipe
        gate, opener = os.pipe()
        handed: list[int] = [reports, gate]
        try:
            handed.append(rules := _in_memory(make_filter()))
            contents = {name: _in_memory(content) for name, content in files.items()}
            handed += contents.values()
            # values may be secrets, and all users of this machine see command lines
            handed.append(variables := _in_memory(write_variables(view.environment)))
            process = await asyncio.create_subprocess_exec(
                *[program, *_walls(view), *_contents(contents, view), "--json-status-fd", str(reports)],
                *["--block-fd", str(gate)],
                *["--args", str(variables), "--seccomp", str(rules), "--", *inside],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=handed,
                # bwrap itself keeps the mark, by which leftovers of a killed run are found
                env={name: os.environ[name] for name in (MARK,) if name in os.environ},
                cwd="/",
                # the longest line that Running.ask reads
                limit=limits.output_bytes,
            )
            _share_output(process.pid)
        except OSError as error:
            os.close(status)
            raise SandboxUnavailable(f"bwrap cannot be started: {error.strerror or error}") from error
        except BaseException:
            os.close(status)
            raise
        finally:
            for handle in (*handed, opener):
                os.close(handle)
        box = Running(process, status, limits, view.writable)
        await box.begin()
        return box

    async def check(self) -> None:
        """Run a process that forks. Raises SandboxUnavailable, with the fix, if that fails."""
        if shutil.which("bwrap") is None:
            raise SandboxUnavailable(MISSING)
        try:
            ran = await self.run(["python3", "-I", "-c", PROBE], limits=Limits(seconds=SANDBOX_CHECK_TIMEOUT_S))
        except SandboxUnavailable as error:
            raise SandboxUnavailable(FORBIDDEN.format(said=error)) from error
        # the probe prints whether it is not root, and whether /etc is visible
        if ran.stdout.split() != [b"True", b"False"]:
            said = last_line(ran.stderr) or f"it printed {ran.stdout[:80]!r}"
            raise SandboxUnavailable(FORBIDDEN.format(said=f"exit code {ran.exit_code}: {said}"))


def mount_system() -> list[str]:
    """Return the options that show this machine's programs and libraries, read-only."""
    system = ["--ro-bind", "/usr", "/usr"]
    # on many systems /bin is a link to /usr/bin; programs name both
    for name in ("bin", "sbin", "lib", "lib64"):
        folder = Path("/", name)
        if folder.is_symlink():
            system += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            system += ["--ro-bind", str(folder), str(folder)]
    return system


def _share_output(pid: int) -> None:
    """Let every user open the output of a process by name, /dev/stdout or /dev/stderr: the program is not root."""
    for number in (1, 2):
        with suppress(OSError):  # it has ended
            os.chmod(f"/proc/{pid}/fd/{number}", 0o666)


def _make_default_view(limits: Limits) -> View:
    """Return the view of a sandbox without files of its own: this machine's programs, and a /tmp in memory."""
    python = [] if _python_home() == "/usr" else ["--ro-bind", _python_home(), PYTHON]
    disk = ["--perms", "1777", "--size", str(limits.disk_mib * MIB), "--tmpfs", "/tmp"]
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
    # 0777: the program may have another user id than bwrap
    mounts = (*mount_system(), *python, *disk, "--perms", "0777", "--dir", WORK)
    return View(mounts=mounts, folder=WORK, environment=environment)


def _walls(view: View) -> list[str]:
    """Return the options that isolate the sandbox from the machine."""
    # -try: some kernels and containers have no cgroup namespaces
    names = ("ipc", "pid", "uts", "cgroup-try", *(() if view.network else ("net",)))
    spaces = [f"--unshare-{name}" for name in names]
    # setpriv needs both to switch to the other user id, and gives them up with that
    user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if os.getuid() != 0:
        user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    # not bwrap's --dev, which would add terminals
    devices = ["--perms", "0755", "--size", "65536", "--tmpfs", "/dev"]
    for name in ("null", "zero", "full", "random", "urandom"):
        devices += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    if "--proc" in view.mounts:
        targets = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
        devices += [
            part for name, end in targets.items() for part in ("--symlink", f"/proc/self/fd{end}", f"/dev/{name}")
        ]
    # Semaphores and shared memory need /dev/shm. As a link, they count towards the limit on /tmp.
    devices += ["--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"]
    # --as-pid-1: INIT is process 1, so its end ends the namespace. --new-session: no input into the caller's terminal.
    end = ["--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox"]
    return [*spaces, *user, *end, *view.mounts, *devices]


def _contents(files: Mapping[str, int], view: View) -> list[str]:
    """Return the options for files. files: handles by name."""
    # 0666: the program may have another user id than bwrap
    given = [
        part
        for name, handle in files.items()
        for part in ("--perms", "0666", "--file", str(handle), f"{view.folder}/{name}")
    ]
    # the root becomes read-only after all files are there
    return [*given, "--remount-ro", "/", "--chdir", view.folder]


def write_variables(environment: Mapping[str, str]) -> bytes:
    """Return the options for the environment as bwrap reads them, each ended by NUL.

    Raises SandboxUnavailable for a variable that would be read as further options.
    """
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name + value:
            raise SandboxUnavailable(f"the variable {quote(name)} has no name, or a NUL, or = in its name")
    # --clearenv first, or it would remove these variables
    parts = ["--clearenv", *(part for pair in environment.items() for part in ("--setenv", *pair))]
    return b"".join(part.encode() + b"\0" for part in parts)


def _drop_privileges(user: int | None) -> list[str]:
    """Return the command that gives up root, or [] for other users. user: as in `View`."""
    if os.getuid() != 0:
        return []
    uid = str(draw_user() if user is None else user)
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--no-new-privs", "--"]


def draw_user() -> int:
    """Return an unused user id, drawn at random."""
    return secrets.choice(USER_IDS)


def _set_limits(limits: Limits, *, cpu: bool) -> list[str]:
    """Return the command that sets the kernel's limits per process, and on their number."""
    # the soft limit sends SIGXCPU, the hard one kills a second later; see OUT_OF_TIME
    # the kernel counts CPU time in whole seconds
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
    """Replace "python3" by the path of this run's Python inside the sandbox."""
    program, *arguments = command
    if program == "python3":
        home, inside = _python_home(), "/usr" if _python_home() == "/usr" else PYTHON
        # resolved, since the name may be a link to a versioned file
        program = inside + os.path.realpath(_BASE).removeprefix(home)
    return [program, *arguments]


def _python_home() -> str:
    """Return the folder of this run's Python, or "/usr" for the system's."""
    home = os.path.realpath(sys.base_prefix)
    return "/usr" if home == "/usr" or home.startswith("/usr/") else home


def _in_memory(content: bytes) -> int:
    """Return the handle of an in-memory file."""
    handle = os.memfd_create("sandbox")
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(content)
    # bwrap reads on from the handle's position
    os.lseek(handle, 0, os.SEEK_SET)
    return handle
