"""What a long run may take: readings that grow are told, and the real run of `make verify` grows by nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.benchmarks.long_run import Reading, judge, list_files
from tools.mutants import ROOT

FIRST = Reading(
    seconds=6.0, steps=30, memory_mib=600.0, handles=30, processes=3, growing_bytes=200, other_bytes=9, files=4
)


def readings(**growth: float) -> list[Reading]:
    """Thirty readings at which the named numbers have grown by so much each time."""
    steady = {"steps": 30, "growing_bytes": 200} | growth
    return [replace(FIRST, **{name: getattr(FIRST, name) + n * by for name, by in steady.items()}) for n in range(30)]


@pytest.mark.parametrize(
    ("growth", "said"),
    [
        ({}, ""),
        ({"memory_mib": 1.7}, ""),  # 17 MiB in a third, of 617
        ({"memory_mib": 2.5}, "memory grew from 636 to 661 MiB"),
        ({"handles": 0.2}, "open files and threads grew from 33 to 35"),
        ({"processes": 0.2}, "processes grew from 6 to 8"),
        ({"other_bytes": 1}, "files beside metrics.jsonl and samples grew from 28 to 38 bytes"),
    ],
)
def test_growth_is_told(growth: dict[str, float], said: str):
    assert judge(readings(**growth)) == ([said] if said else [])


def test_steps_that_write_more_and_more_are_told():
    growing = [replace(one, growing_bytes=one.steps**2) for one in readings()]
    assert judge(growing) == ["a step adds 1,530 bytes, and added 930"]


def test_a_checkpoint_that_is_removed_while_files_are_counted_is_no_error(tmp_path: Path):
    for name in ("metrics.jsonl", "step_1/model/weights", "step_1/state/rank_0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files = list_files(tmp_path)
    assert next(files).name == "metrics.jsonl" and next(files).parent.parent.name == "step_1"
    shutil.rmtree(tmp_path / "step_1")
    assert list(files) == []


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_half_an_hour_of_short_steps_takes_no_more_memory():
    command = [sys.executable, "-m", "tools.benchmarks.long_run", "--minutes", "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
