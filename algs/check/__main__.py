"""python -m algs.check FILE_OR_NAME [key=value ...]; see checker.py."""

from __future__ import annotations

import sys
from functools import partial

from algs.check.checker import run
from core.cli import run_guarded

if __name__ == "__main__":
    sys.exit(run_guarded(partial(run, sys.argv[1:])))
