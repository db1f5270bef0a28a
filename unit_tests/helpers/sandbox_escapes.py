"""Code that tries to get out of the sandbox, or to do harm from inside, with what must have come of each.

    python -m unit_tests.helpers.sandbox_escapes NAME ... < SECRETS

runs some of them and prints their outcomes as JSON. It imports nothing beyond the standard library and rewards.sandbox,
so that another user's plain Python can run it. SECRETS is JSON of what this machine has and the sandbox must not reach.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rewards.sandbox import Bubblewrap, Limits

AT_ONCE = 4
COMMON = """
import ctypes, errno, json, os, resource, signal, socket, subprocess, sys, time
SECRETS = json.loads(os.read(0, 65536))
libc = ctypes.CDLL(None, use_errno=True)

def fails(call, *arguments):
    try:
        call(*arguments)
    except (OSError, ValueError) as error:
        return getattr(error, "errno", None) or -1
    return 0

def syscall(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(number, *arguments), errno.errorcode.get(ctypes.get_errno())

def say(*what):
    print(json.dumps(what))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one run, with its output read as the JSON that `say` wrote."""

    exit_code: int | None
    killed_for: str | None
    said: Any
    stderr: str
    printed: int
    """Bytes of stdout and stderr."""


@dataclass(frozen=True, slots=True)
class Escape:
    code: str
    is_contained: Callable[[Outcome], bool]
    limits: dict[str, Any] = field(default_factory=dict)


def said(*what: Any) -> Callable[[Outcome], bool]:
    return lambda ran: ran.exit_code == 0 and ran.said == [*what]


def killed(reason: str) -> Callable[[Outcome], bool]:
    return lambda ran: ran.killed_for == reason and ran.exit_code is None


def refused(words: str) -> Callable[[Outcome], bool]:
    return lambda ran: ran.killed_for is None and ran.exit_code == 1 and words in ran.stderr


ESCAPES = {
    "fork bomb": Escape(
        "while True:\n    try: os.fork()\n    except OSError: pass",
        killed("time"),
        {"seconds": 2.0},
    ),
    "more processes than allowed": Escape(
        "n = 0\n"
        "try:\n"
        "    while n < 200:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        n += 1\n"
        "except OSError: pass\n"
        "say(8 <= n < 16)",
        said(True),
        {"processes": 16},
    ),
    "memory of one process": Escape("bytearray(10**10)", refused("MemoryError")),
    "memory of many processes": Escape(
        "for _ in range(20):\n    if os.fork() == 0: hoard = b'x' * 10**8; time.sleep(60)\ntime.sleep(60)",
        killed("memory"),
        {"memory_mib": 256},
    ),
    "disk fill": Escape(
        "for i in range(1000):\n    open(f'{i}', 'wb').write(bytes(10**7))", refused("No space left"), {"disk_mib": 50}
    ),
    "disk fill through /dev/shm": Escape(
        "for i in range(1000):\n    open(f'/dev/shm/{i}', 'wb').write(bytes(10**7))",
        refused("No space left"),
        {"disk_mib": 50},
    ),
    "huge file": Escape("open('huge', 'wb').write(bytes(10**8))", refused("File too large"), {"disk_mib": 200}),
    "a million files": Escape(
        "for i in range(10**6): open(f'{i}', 'w').close()\ntime.sleep(60)", killed("files"), {"files": 1000}
    ),
    "all file handles": Escape(
        "kept = []\n"
        "try:\n"
        "    while len(kept) < 5000: kept.append(os.dup(1))\n"
        "except OSError: pass\n"
        "say(len(kept) < 64)",
        said(True),
        {"open_files": 64},
    ),
    "limits raised": Escape(
        "say([fails(resource.setrlimit, which, (-1, -1)) != 0 for which in\n"
        "     (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)])",
        said([True] * 4),
    ),
    "sleep beyond the time": Escape("time.sleep(600)", killed("time"), {"seconds": 1.0}),
    "deaf and busy": Escape(
        "for n in range(1, 64):\n    fails(signal.signal, n, signal.SIG_IGN)\nimport threading\nwhile True: pass",
        killed("time"),
        {"seconds": 1.0},
    ),
    "output flood": Escape(
        "while True: os.write(1, b'x' * 65536)",
        lambda ran: killed("output")(ran) and ran.printed <= 2 * 100_000,
        {"output_bytes": 100_000},
    ),
    "flood of errors": Escape(
        "while True: os.write(2, b'x' * 65536)",
        lambda ran: killed("output")(ran) and ran.printed <= 2 * 100_000,
        {"output_bytes": 100_000},
    ),
    "network": Escape(
        "addresses = [('127.0.0.1', SECRETS['port']), ('10.0.0.1', 80), ('1.1.1.1', 53)]\n"
        "say([fails(socket.create_connection, at, 5) != 0 for at in addresses])",
        said([True] * 3),
    ),
    "names in the network": Escape(
        "say(fails(socket.getaddrinfo, 'pypi.org', 443) != 0)",
        said(True),
    ),
    "a Unix socket of this machine": Escape(
        "one = socket.socket(socket.AF_UNIX)\nsay(fails(one.connect, '\\0' + SECRETS['abstract']) != 0)", said(True)
    ),
    "sockets past the network namespace": Escape(
        "say([fails(socket.socket, family, kind) == errno.EAFNOSUPPORT for family, kind in\n"
        "     ((40, 1), (16, 3), (17, 3), (38, 5), (29, 3))])",  # vsock, netlink, packet, the kernel's ciphers, CAN
        said([True] * 5),
    ),
    "environment": Escape(
        "say(sorted(k for k, v in os.environ.items() if SECRETS['secret'] in v), len(os.environ) < 14)", said([], True)
    ),
    "files of this machine": Escape(
        "paths = ['/etc', '/root', '/home', '/var', '/sys', '/run', '/opt', *SECRETS['files']]\n"
        "say([path for path in paths if os.path.exists(path)], os.listdir('/tmp'), sorted(os.listdir('.')))",
        said([], ["work"], ["main.py"]),
    ),
    "/proc of other processes": Escape(
        "say(os.path.exists('/proc'), fails(os.kill, SECRETS['pid'], 0) == errno.ESRCH)", said(False, True)
    ),
    "inherited handles": Escape("say([n for n in range(1024) if fails(os.fstat, n) == 0])", said([0, 1, 2])),
    "parents signalled": Escape(
        "for n in (signal.SIGTERM, signal.SIGKILL): fails(os.kill, 1, n), fails(os.kill, os.getppid(), n)\nsay('on')",
        said("on"),
    ),
    "everybody signalled": Escape(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nfails(os.kill, -1, 15)\nsay('on')", said("on")
    ),
    "ptrace and what else the filter refuses": Escape(
        "import platform\n"
        "calls = (101, 310, 165, 272, 308, 250, 321, 425, 438, 155) if platform.machine() == 'x86_64' else\\\n"
        "    (117, 270, 40, 97, 268, 219, 280, 425, 438, 41)\n"
        "say([syscall(n, 0, 0, 0, 0)[1] for n in calls])",
        said(["EPERM"] * 10),
    ),
    "root in a namespace of its own": Escape(
        "clone = 56 if os.uname().machine == 'x86_64' else 220\n"
        "say(syscall(clone, 0x10000000 | 17, 0, 0, 0, 0)[1], syscall(435, 0, 0)[1])",
        said("EPERM", "ENOSYS"),
    ),
    "mount": Escape(
        "say(subprocess.run(['mount', '-t', 'tmpfs', 'x', '/tmp'], capture_output=True).returncode != 0)", said(True)
    ),
    "setuid": Escape(
        "PR_GET_NO_NEW_PRIVS = 39\n"
        "class Sets(ctypes.Structure): _fields_ = [(n, ctypes.c_uint32) for n in 'abcdef']\n"
        "header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), Sets()\n"
        "libc.capget(header, ctypes.byref(sets))\n"
        "say(fails(os.setuid, 0) != 0, libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), os.getuid() > 0,\n"
        "    os.getgroups() in ([], [65534]), [getattr(sets, n) for n in 'abcdef'])",
        said(True, 1, True, True, [0] * 6),
    ),
    "device made": Escape(
        "say(fails(os.mknod, 'disk', 0o60666, os.makedev(8, 0)) != 0, sorted(os.listdir('/dev')))",
        said(True, ["full", "null", "random", "shm", "urandom", "zero"]),
    ),
    "system written to": Escape(
        "say([fails(open, path, 'w') != 0 for path in ('/usr/x', '/usr/bin/python3', '/x', '/dev/x', os.__file__)])",
        said([True] * 5),
    ),
    "symlink out of the folder": Escape(
        "os.symlink(SECRETS['files'][0], 'link')\nsay(fails(open, 'link'), fails(open, 'link', 'w'))",
        said(2, 2),
    ),
    "a child that outlives it": Escape(
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for n in range(3): os.close(n)\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "os.wait()\nsay('ended')",
        said("ended"),
    ),
    "a child that holds the output": Escape(
        "if os.fork() == 0: time.sleep(600)\nsay('ended')",
        said("ended"),
    ),
    "the clock of the machine": Escape("say(fails(time.clock_settime, time.CLOCK_REALTIME, 0.0))", said(1)),
    "another process's limits": Escape(
        "say(fails(resource.prlimit, os.getppid(), resource.RLIMIT_NOFILE, (0, 0)))", said(1)
    ),
}


async def run_escapes(names: list[str], secrets: dict[str, Any]) -> dict[str, Outcome]:
    """Run some, a few at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def run_one(name: str) -> Outcome:
        escape = ESCAPES[name]
        async with places:
            ran = await Bubblewrap().run(
                ["python3", "main.py", secrets["mark"]],
                files={"main.py": (COMMON + escape.code).encode()},
                stdin=json.dumps(secrets).encode(),
                limits=Limits(**({"seconds": 60.0} | escape.limits)),
            )
        lines = ran.stdout.decode(errors="replace").splitlines()
        return Outcome(
            exit_code=ran.exit_code,
            killed_for=ran.killed_for,
            said=json.loads(lines[-1]) if lines and lines[-1].startswith("[") else None,
            stderr=ran.stderr.decode(errors="replace")[-2000:],
            printed=len(ran.stdout) + len(ran.stderr),
        )

    return dict(zip(names, await asyncio.gather(*map(run_one, names)), strict=True))


if __name__ == "__main__":
    done = asyncio.run(run_escapes(sys.argv[1:], json.load(sys.stdin)))
    print(json.dumps({name: {f: getattr(o, f) for f in Outcome.__slots__} for name, o in done.items()}))
