"""Rows of the results that are older than the code they measure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from tools.benchmarks.processes import ROW
from tools.benchmarks.results import (
    PAGE,
    PATHS,
    ROOT,
    RUN,
    SPEEDS,
    ask_git,
    count_later,
    measure,
    read_rows,
    write_row,
)


def test_a_row_is_old_if_a_later_commit_changed_what_it_measures(tmp_path):
    def git(*question: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return ask_git(tmp_path, *named, *question)

    def commit(file: str, text: str) -> None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", file)

    git("init", "-q")
    commit(PAGE, "| what | command |\n|---|---|\n| speed | 3 | `python -m tools.benchmarks.estimators --x` |\n")
    commit("trainers/a.py", "1")
    [row] = read_rows(git("blame", "--line-porcelain", PAGE))
    assert (row.name, row.module) == ("speed", "tools.benchmarks.estimators")
    assert datetime.now(UTC).date() >= row.written.date()
    assert count_later(row, tmp_path) == 0
    commit("algs/a.py", "1")
    assert count_later(row, tmp_path) == 1


def test_a_measured_row_is_written_and_no_other(tmp_path):
    command = "python -m tools.benchmarks.rl_vs_trl"
    page = f"| a | 1 s | `{command}` |\n| b | 2 s, `x` | `{command} --work long` |\ntext `{command}` |\n"
    done = write_row(page, f"{command} --work long", r"3 s \1")
    assert done == page.replace("2 s, `x`", r"3 s \1")


def test_a_command_passes_on_its_output_and_its_row_is_found(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "a.py"
    for code, row in ((0, ROW + "5 s"), (1, ROW + "6 s")):
        script.write_text(f"print('line')\nprint({row!r})\nraise SystemExit({code})")
        assert measure(f"python {script}") == row.removeprefix(ROW)
    assert capfd.readouterr().out.splitlines() == ["line", ROW + "5 s", "line", ROW + "6 s"]
    failures = {"print('line')": "0, its row: none", f"print({ROW + '5 s'!r})\nraise SystemExit(2)": "2, its row: 5 s"}
    for text, said in failures.items():
        script.write_text(text)
        with pytest.raises(SystemExit, match=f"a.py ended with exit code {said}$"):
            measure(f"python {script}")


def test_every_speed_has_a_row_that_a_command_writes():
    page = (ROOT / PAGE).read_text()
    for name in SPEEDS:
        commands = re.findall(rf"\| `(python -m tools\.benchmarks\.{name}\b[^`]*)` \|$", page, re.MULTILINE)
        assert commands, name
        assert all("| new | " in write_row(page, command, "new") for command in commands), name


def test_every_named_module_and_folder_is_there():
    page = (ROOT / PAGE).read_text()
    assert [module for module in PATHS if module not in page] == []
    assert [
        path for path in {*RUN, *(path for paths in PATHS.values() for path in paths)} if not (ROOT / path).is_dir()
    ] == []
