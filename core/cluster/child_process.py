"""Start a module of this repository as a child process, connected by a socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def start_module(module: str, socket: int, *, folder: str | None = None, hidden: str = "") -> subprocess.Popen[bytes]:
    """Run `python -m MODULE SOCKET` in a new interpreter that inherits only the file descriptor `socket`.

    The child can import this repository from any folder. It imports nothing else from `folder` unless PYTHONPATH lists
    it.
    folder: working folder of the child; None: that of this process. hidden: environment variable that it must not see.
    """
    # -P, below, leaves the working folder out of the child's sys.path, so the path names what it needs.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # stdout=2: the child's prints go to stderr, so that they cannot mix with the run's output.
    # New session: Ctrl-C reaches the run only, and one kill of the process group reaches all descendants there.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(socket)],
        pass_fds=[socket],
        stdin=subprocess.DEVNULL,
        stdout=2,
        env={**{name: value for name, value in os.environ.items() if name != hidden}, "PYTHONPATH": path},
        cwd=folder,
        start_new_session=True,
    )
