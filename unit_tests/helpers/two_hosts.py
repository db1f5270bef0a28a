"""Two hosts on one machine: network namespaces on a wire, each with its own address, host name and loopback.

As on a fresh Debian, the name of a host resolves to its loopback. Needs root, `ip`, and a kernel that lets it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from core.cluster.capacity import SLOT

ROOT = Path(__file__).parent.parent.parent
ADDRESS = {"nodea": "10.77.0.1", "nodeb": "10.77.0.2"}
NODE_B = "nodeb (10.77.0.2)"
"""What sentences call the other host."""
HEAD = f"{ADDRESS['nodea']}:6379"
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
STARTED = "Ray runtime started"
WAIT_FOR_BOTH = f"""
import ray, time
ray.init(address="{HEAD}", logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) != 2:
    time.sleep(0.5)
"""


def find_lack() -> str:
    """Why there can be no such hosts here; "" if they can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [name for name in ("ip", "unshare", "nsenter", "mount") if shutil.which(name) is None]:
        return f"there is no command {lacking[0]}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    name = f"feynrl-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made.stderr.strip()


LACK = "" if os.environ.get("FEYNRL_NEEDS_NAMESPACES") else find_lack()
needs_two_hosts = pytest.mark.skipif(bool(LACK), reason=f"no two hosts here: {LACK}")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


class Hosts:
    """The hosts nodea, where Ray's head and the drivers run, and nodeb."""

    made = count()

    def __init__(self, folder: Path) -> None:
        """folder: for logs."""
        self.logs, self.mark = folder, f"feynrl-{os.getpid()}-{next(self.made)}"
        self.ray_folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path, for Unix sockets
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        self.slots: dict[str, int] = {}
        self.rays: dict[str, subprocess.Popen[bytes]] = {}
        self.runs: list[subprocess.Popen[bytes]] = []
        self.is_cut = False

    def space(self, host: str) -> str:
        return f"{self.mark}-{host}"

    def connect(self) -> None:
        """Join both hosts by a wire."""
        ends = [f"{self.mark.replace('feynrl', 'f')}{host[-1]}" for host in ADDRESS]  # at most 15 letters
        command = [sys.executable, "-m", "unit_tests.helpers.slow_wire", *ends]
        self.wire = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.wire.stdout is not None and self.wire.stdout.readline() == "ready\n"
        for host, end in zip(ADDRESS, ends, strict=True):
            space = self.space(host)
            ip("netns", "add", space)
            names = Path("/etc/netns") / space  # `ip netns exec` puts it in the place of /etc/hosts
            names.mkdir(parents=True)
            (names / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
            ip("link", "set", end, "netns", space)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", end, "name", "eth0")
            ip("-n", space, "address", "add", f"{ADDRESS[host]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "route", "add", "default", "dev", "eth0")

    def set_wire(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Set the delay of every packet and the share that is lost, both ways."""
        assert self.wire.stdin is not None
        self.wire.stdin.write(f"{delay_s} {loss}\n")
        self.wire.stdin.flush()

    def cut(self) -> None:
        self.set_wire(loss=1.0)
        self.is_cut = True

    def heal(self) -> None:
        """Make the wire whole, and start Ray on nodeb again where it was cut off."""
        self.set_wire()
        if self.is_cut:
            end_processes([self.space("nodeb")])
            self.rays["nodeb"].wait()
            self._start_ray("nodeb")
            code = self.start("nodea", sys.executable, "-c", WAIT_FOR_BOTH, log=self.logs / "heal.log").wait(120.0)
            assert code == 0, (self.logs / "heal.log").read_text()
            self.is_cut = False

    def start_run(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a driver on nodea; `end_runs` kills it, where it has not ended."""
        self.runs.append(self.start("nodea", sys.executable, *command, log=self.logs / "run.log"))
        return self.runs[-1]

    def end_runs(self) -> None:
        for run in self.runs:
            run.kill()
            run.wait()
        self.runs.clear()

    def start(self, host: str, *command: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a process on a host; its output goes to `log`."""
        name_it = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        inside = ["ip", "netns", "exec", self.space(host), "unshare", "--uts", "sh", "-ec", name_it, host, *command]
        with log.open("wb") as out:
            return subprocess.Popen(inside, cwd=ROOT, env=self.environment, stdout=out, stderr=subprocess.STDOUT)

    def start_ray(self, slots: Mapping[str, int]) -> None:
        """Start Ray on the hosts; each takes as many ranks as it has slots."""
        self.slots |= slots
        for host in slots:
            self._start_ray(host)

    def _start_ray(self, host: str) -> None:
        place = ["--head", "--port=6379", f"--temp-dir={self.ray_folder}", "--include-dashboard=false"]
        options = place if host == "nodea" else [f"--address={HEAD}"]
        resources = f'{{"{SLOT}": {self.slots[host]}}}'
        options += ["--num-cpus=1", "--object-store-memory=200000000", f"--resources={resources}", "--block"]
        log = self.logs / f"ray-{host}.log"
        self.rays[host] = self.start(host, *RAY, "start", *options, log=log)
        until = time.monotonic() + 120.0
        while STARTED not in log.read_text():
            assert self.rays[host].poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.5)

    @contextmanager
    def mounted(self, host: str, *arguments: str) -> Iterator[None]:
        """Mount something that only this host sees: arguments of `mount`, the last one its place."""
        inside = ["nsenter", "--mount", "--target", str(self.rays[host].pid)]
        subprocess.run([*inside, "mount", *arguments], check=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "umount", "--lazy", arguments[-1]], check=True)

    def close(self) -> None:
        """End all processes of the hosts, and remove the hosts."""
        spaces = [space for space in ip("netns", "list").split() if space.startswith(f"{self.mark}-")]
        end_processes(spaces)
        for process in self.rays.values():
            process.wait()
        for space in spaces:
            ip("netns", "del", space)
            shutil.rmtree(Path("/etc/netns") / space)
        if hasattr(self, "wire"):
            self.wire.kill()
            self.wire.communicate()
        shutil.rmtree(self.ray_folder, ignore_errors=True)


def end_processes(spaces: Iterable[str]) -> None:
    """End all processes in these namespaces: first as `ray stop` would, then for good."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in (int(pid) for space in spaces for pid in ip("netns", "pids", space).split()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(2.0 if number == signal.SIGTERM else 0.5)
