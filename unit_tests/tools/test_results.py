"""Rows of the results that are older than the code they measure."""

from __future__ import annotations

from datetime import UTC, datetime

from tools.benchmarks.results import PAGE, PATHS, ROOT, RUN, ask_git, count_later, read_rows


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


def test_every_named_module_and_folder_is_there():
    page = (ROOT / PAGE).read_text()
    assert [module for module in PATHS if module not in page] == []
    assert [
        path for path in {*RUN, *(path for paths in PATHS.values() for path in paths)} if not (ROOT / path).is_dir()
    ] == []
