"""The small tasks for boxes: their reference solutions pass, and nothing else does."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from data_prep import harbor
from data_prep.boxed_tasks import ETC, PROGRAMS, TASKS, write_harbor_task


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


def test_a_box_has_names_for_its_user_and_its_group():
    fields = {file: content.decode().splitlines()[0].split(":") for file, content in ETC.items()}
    assert {file: (name, number) for file, (name, _, number, *_) in fields.items()} == {
        "etc/passwd": ("root", "0"),
        "etc/group": ("root", "0"),
    }


def test_tasks_of_a_folder_become_rows_with_the_image_that_is_named(tmp_path: Path, capsys):
    for name in ("set-port", "count-lines"):
        write_harbor_task(tmp_path / "tasks" / name, TASKS[name])
    out, image = tmp_path / "rows.jsonl", f"debian@sha256:{'0' * 64}"
    (tmp_path / "tasks/set-port/task.toml").write_text("[environment]\nallow_internet = true\n")
    words = ["--tasks", f"{tmp_path}/tasks", "--out", str(out)]
    harbor.main([*words, "--image", image, "--network"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["answer"], json.loads(row["extra"])) for row in rows] == [
        (name, "", {"task": f"{tmp_path}/tasks/{name}", "image": image}) for name in ("count-lines", "set-port")
    ]
    harbor.main([*words, "--image", image])
    assert len(out.read_text().splitlines()) == 1, "the other one wants the network"
    assert f"{out}: 1 of 2 folders are invalid and excluded: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        harbor.main([*words, "--network"])
    said = capsys.readouterr().err.rpartition("error: ")[2]
    assert said == (
        f"none of 2 folders fits: 2 bad_extra (such as folder {tmp_path}/tasks/count-lines: task.toml has no "
        "docker_image: set --image)\n"
    )
