"""The small tasks for boxes: their reference solutions pass, and nothing else does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from data_prep.boxed_tasks import PROGRAMS, TASKS, write_harbor_task


def run_script(file: Path) -> None:
    subprocess.run(["bash", str(file)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_failed_at_first_and_passed_after_its_solution(name, tmp_path: Path):
    write_harbor_task(tmp_path / "task", TASKS[name])
    rewards = tmp_path / "logs" / "verifier"
    rewards.mkdir(parents=True)
    app = tmp_path / "app"
    shutil.copytree(tmp_path / "task" / "environment" / "app", app)
    solve, test = (tmp_path / "task" / script for script in ("solution/solve.sh", "tests/test.sh"))
    for script in (solve, test):
        # no box: its folders are elsewhere
        script.write_text(script.read_text().replace("/app", str(app)).replace("/logs/verifier", str(rewards)))
    run_script(test)
    without = {file.name: file.read_text() for file in rewards.iterdir()}
    run_script(solve)
    run_script(test)
    solved = {file.name: file.read_text() for file in rewards.iterdir()}
    if name == "set-port":
        assert without == {"reward.json": '{"reward": 0, "port": 0, "kept": 1}\n'}
        assert solved == {"reward.json": '{"reward": 1, "port": 1, "kept": 1}\n'}
    else:
        assert (without, solved) == ({"reward.txt": "0\n"}, {"reward.txt": "1\n"})


USUAL = """
    awk basename bash cat chmod cmp comm cp cut date dd diff dirname echo env expr false find grep gzip head id join ln
    ls mkdir mkfifo mktemp mv nl od paste printf pwd readlink realpath rm rmdir sed seq sh sha256sum sleep sort stat tac
    tail tar tee test touch tr true uniq wc xargs
"""
"""What a policy may expect of a shell."""


def test_a_box_has_the_usual_small_programs():
    assert {*USUAL.split()} <= {*PROGRAMS} and len({*PROGRAMS}) == len(PROGRAMS)
