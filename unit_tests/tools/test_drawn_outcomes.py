"""What became of drawn bugs is kept, so that a run that was stopped goes on."""

from __future__ import annotations

from pathlib import Path

from tools.drawn_mutants.outcomes import Outcomes
from tools.mutants import Mutant


def make_bug(breaks: str = "algs/a.py:1: off by one", tests: tuple[str, ...] = ("algs/test_a.py::test_one",)) -> Mutant:
    return Mutant(file="algs/a.py", old="1", new="2", breaks=breaks, tests=tests)


def write_tests(root: Path, text: str) -> None:
    for name in ("test_a", "test_b"):
        (root / f"unit_tests/algs/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (root / f"unit_tests/algs/{name}.py").write_text(text)


def test_an_outcome_is_found_by_the_next_run(tmp_path: Path):
    write_tests(tmp_path, "def test_one(): ...")
    file = tmp_path / "build/outcomes.jsonl"
    noticed, survived = make_bug(), make_bug("algs/a.py:2: constant")
    first = Outcomes(file, tmp_path)
    first.add(noticed, "algs/test_a.py::test_one")
    first.add(survived, "")
    for outcomes in (first, Outcomes(file, tmp_path)):
        assert outcomes.find(noticed) == "algs/test_a.py::test_one"
        assert outcomes.find(survived) == ""
        for other in (make_bug("algs/a.py:3: axis"), make_bug(tests=("algs/test_b.py::test_one",))):
            assert outcomes.find(other) is None


def test_a_bug_is_planted_again_where_a_file_of_its_tests_has_changed(tmp_path: Path):
    write_tests(tmp_path, "def test_one(): ...")
    outcomes = Outcomes(tmp_path / "outcomes.jsonl", tmp_path)
    outcomes.add(make_bug(), "")
    write_tests(tmp_path, "def test_one(): assert False")
    assert outcomes.find(make_bug()) is None


def test_a_line_that_was_cut_short_is_no_outcome(tmp_path: Path):
    write_tests(tmp_path, "def test_one(): ...")
    file = tmp_path / "outcomes.jsonl"
    bugs = [make_bug(), make_bug("algs/a.py:2: constant")]
    outcomes = Outcomes(file, tmp_path)
    for bug in bugs:
        outcomes.add(bug, "a test")
    file.write_text(file.read_text()[:-5])
    again = Outcomes(file, tmp_path)
    assert [again.find(bug) for bug in bugs] == ["a test", None]
    again.add(bugs[1], "")
    assert Outcomes(file, tmp_path).find(bugs[1]) == ""
