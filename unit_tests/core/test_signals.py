"""Signals while a program starts, and while it runs."""

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


THREE = """
import signal
from core.cluster.signals import end_on_signals

end_on_signals(first=lambda: print("ends in order", flush=True), at_once=lambda: print("cleans up", flush=True))
for _ in range(3):
    signal.raise_signal(signal.SIGTERM)
"""


def test_the_second_signal_is_answered_on_stderr_and_the_third_exits() -> None:
    path = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", THREE], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    said = "the run is ending; once more, and it ends at once\ninterrupted\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "ends in order\ncleans up\n", said)


ELSEWHERE = """
import threading
from functools import partial
from core.cluster.signals import end_on_signals, pass_on_interrupt

def ask() -> None:
    try:
        pass_on_interrupt()
    except KeyboardInterrupt:
        print("there is no run", flush=True)

ask()
for name in ("first", "second"):
    first = partial(print, f"the {name} run ends", flush=True)
    run = threading.Thread(target=end_on_signals, kwargs={"first": first})
    run.start()
    run.join()
    ask()
"""


def test_an_interrupt_ends_the_run_of_another_thread_if_there_is_one() -> None:
    path = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    said = "there is no run\nthe first run ends\nthe second run ends\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
