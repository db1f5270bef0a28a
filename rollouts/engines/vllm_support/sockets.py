"""A place for the sockets by which vLLM's processes talk: vLLM leaves them behind."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache

VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's variable: the folder of its sockets. In a run it is the temporary folder (core/cluster/scratch.py)."""
LONGEST_BASE = 56
"""Bytes. Up to 51 follow: a folder of ours, and a socket; together a Unix socket allows 107."""


def place_sockets() -> None:
    """Let vLLM put its sockets where they are removed: outside of a run into a folder of this process's own."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = _make_folder()


@cache
def _make_folder() -> str:
    """Return one folder for all engines of this process, which goes with it: vLLM may remember the variable."""
    usual = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="vllm-", dir=usual if len(os.fsencode(usual)) <= LONGEST_BASE else "/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
