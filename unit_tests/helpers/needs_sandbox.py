"""Whether tests of code that is run can run here; CI says by a variable that they must."""

from __future__ import annotations

import os
import subprocess

import pytest

PLAIN = ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true")


def find_lack() -> str:
    """Why code cannot be run here, "" if it can.

    Bubblewrap itself is asked, and not our use of it: tests are not skipped because ours is broken.
    """
    try:
        done = subprocess.run(PLAIN, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "bubblewrap is not installed"
    return f"bubblewrap cannot run: {done.stderr.strip()}" if done.returncode else ""


LACK = "" if os.environ.get("FEYNRL_NEEDS_SANDBOX") else find_lack()
needs_sandbox = pytest.mark.skipif(bool(LACK), reason=LACK)
