"""Signals while a program starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass
except BaseException as error:
    raise RuntimeError("as a library that wraps whatever happens in its import") from error
"""
PROGRAM = """
import os, signal, sys
from core.cli import run_guarded

def run():
    if sys.argv[1] == "in an import":
        import victim
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass
    return 0

sys.exit(run_guarded(run))
"""


@pytest.mark.parametrize("moment", ["in an import", "between imports"])
def test_a_signal_while_the_program_starts_is_an_interruption(moment: str, tmp_path: Path) -> None:
    (tmp_path / "victim.py").write_text(MODULE)
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, moment], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
