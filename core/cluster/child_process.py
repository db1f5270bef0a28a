"""Start a module of this repository as a process of its own, which talks with this one over a socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def start_module(module: str, socket: int, *, folder: str | None = None) -> subprocess.Popen[bytes]:
    """Run `python -m MODULE SOCKET` in a new interpreter, which inherits the file descriptor `socket` alone.

    It finds this repository wherever it runs, and nothing of its folder unless PYTHONPATH names that. It has no input,
    and what it prints goes to standard error, where it cannot disturb what the run prints. Its session is its
    own: Ctrl-C is the run's to handle, and one kill of its group reaches all that it has started there.
    folder: where it runs; None: where this process does.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(socket)],
        pass_fds=[socket],
        stdin=subprocess.DEVNULL,
        stdout=2,
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        start_new_session=True,
    )
