"""Forks that do one piece of work: they have imported the libraries already, which takes seconds."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

BROKEN = 70
"""Exit code of work that raised an error."""


def fork_to(work: Callable[[], int]) -> int:
    """Do some work in a fork; return its process id. Its exit code is what the work returns.

    Not by `multiprocessing`: engines in its processes end when they do not find it as their parent.
    """
    if (pid := os.fork()) > 0:
        return pid
    code = BROKEN
    try:
        code = work()
    except BaseException:  # a border: whatever the work does, this process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # not sys.exit: a fork must not run the parent's clean-up, nor go on in its loop
        os._exit(code)
