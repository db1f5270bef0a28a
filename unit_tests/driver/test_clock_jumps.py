"""A machine whose clock jumps: no timeout, no duration and no order of a run comes from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutants import ROOT
from unit_tests.helpers.runs import folder_of, metrics_of

JUMPING = """import itertools, time
_read, _jumps = time.time, itertools.cycle([0.0, 3600.0, -3600.0])
time.time = lambda: _read() + next(_jumps)
time.time_ns = lambda: int(time.time() * 1e9)
"""
"""An hour on, then two hours back, with every look at the clock."""


@pytest.mark.one_core
@pytest.mark.one_core
@pytest.mark.slow
def test_a_clock_that_jumps_by_an_hour_changes_nothing(recipe, tmp_path: Path, sums: Path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(JUMPING)  # in every process of the run
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    changes = {"data.eval": str(sums / "eval.parquet"), "eval_every": 1, "checkpoint.every": 1, "rollout.timeout_s": 60}
    command = [sys.executable, str(ROOT / "main_rl.py"), "--config", recipe(changes)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = metrics_of(folder_of(tmp_path))
    assert [line["step"] for line in lines] == [0, 1] and not any(line["rollout/failed"] for line in lines)
    seconds = {name: line[name] for line in lines for name in line if name.startswith("time/") or "seconds" in name}
    assert "time/step_s" in seconds and all(0 <= value < 60 for value in seconds.values())
