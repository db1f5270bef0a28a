"""Folder for vLLM's sockets. vLLM never removes them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache

VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the socket folder. In a run it is the temporary folder (core/cluster/scratch.py)."""
LONGEST_BASE = 56
"""Maximum length of the base path, in bytes. A folder and a socket name add up to 51; Unix sockets allow 107."""


def place_sockets() -> None:
    """Set vLLM's socket folder to one that is removed: outside a run, a folder of this process."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = _make_folder()


@cache
def _make_folder() -> str:
    """Return one folder for all engines of this process, removed at exit. Cached, since vLLM may remember the
    variable."""
    usual = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="vllm-", dir=usual if len(os.fsencode(usual)) <= LONGEST_BASE else "/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
