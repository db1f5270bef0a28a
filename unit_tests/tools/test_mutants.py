"""The list of planted bugs fits the code, and the program that plants them tells who survives."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tools import layers, mutants
from tools.mutants import ListIsWrong, Mutant, Outcome, summarize, wait_for_one, without_parts

ROOT = Path(__file__).parent.parent.parent
LISTED, _ = mutants.read_list(mutants.LIST)
FOLDERS = (*(layer for layer in layers.LAYERS if (ROOT / layer).is_dir()), "data_prep")


def test_every_bug_can_be_planted_and_is_still_python():
    for mutant in LISTED:
        ast.parse(mutant.plant((ROOT / mutant.file).read_text()))
        assert "".join(mutant.old.split()) != "".join(mutant.new.split()), f"{mutant.file}: nothing changes"


def test_every_test_that_is_named_is_there():
    named = {name.partition("[")[0] for mutant in LISTED for name in mutant.tests}
    text = {name.partition("::")[0]: "" for name in named}
    for file in text:
        text[file] = (ROOT / "unit_tests" / file).read_text()
    for file, _, test in (name.partition("::") for name in named):
        assert not test or f"\ndef {test}(" in text[file], f"{file}::{test}"


def test_the_list_is_long_and_covers_every_folder():
    planted = [mutant for mutant in LISTED if mutant.tests]
    assert len(planted) >= 120
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in LISTED}) == len(LISTED)
    for folder in FOLDERS:
        assert sum(mutant.file.startswith(f"{folder}/") for mutant in planted) >= 5, folder
    assert len(LISTED) - len(planted) <= 0.03 * len(LISTED), "what is equivalent proves nothing"


def test_a_text_that_does_not_occur_once_is_refused():
    mutant = Mutant(file="a.py", old="x", new="y", breaks="all", tests=("test_x.py",))
    assert mutant.plant("a x b") == "a y b"
    for text in ("a b", "x x"):
        with pytest.raises(ListIsWrong, match=r"occurs . times instead of once"):
            mutant.plant(text)


def test_fewer_than_97_of_100_is_not_enough():
    mutant = Mutant(file="a.py", old="x", new="y", breaks="it", tests=("test_x.py",))
    noticed, survived = (Outcome(mutant=mutant, line=3, killed=killed, seconds=1.0) for killed in (True, False))
    told, enough = summarize([noticed] * 97 + [survived] * 3, equivalent=2)
    assert (
        enough
        and told[0] == "survived: a.py:3: it"
        and told[-1].startswith("97 of 100 planted bugs were noticed, 97.0%")
    )
    assert not summarize([noticed] * 96 + [survived] * 4, equivalent=0)[1]
    assert without_parts(["a.py::b", "a.py", "c.py::d"]) == ["a.py", "c.py::d"]


CODE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TESTS = "from code_of_ours import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
NOTICED = {"old": "2 * x", "new": "3 * x", "breaks": "double is triple", "tests": "test_code.py::test_double"}
SURVIVES = {"old": "x / 2", "new": "x / 3", "breaks": "half is a third", "tests": "test_code.py"}
CANNOT_TELL = {"old": "return 2", "new": "return 1 * 2", "breaks": "nothing", "equivalent": "one is neutral"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two functions, of which one is tested."""
    (tmp_path / "code_of_ours.py").write_text(CODE)
    (tmp_path / "unit_tests").mkdir()
    (tmp_path / "unit_tests" / "test_code.py").write_text(TESTS)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def plant(repository: Path, *entries: dict[str, str]) -> subprocess.CompletedProcess[str]:
    listed = repository / "list.yaml"
    listed.write_text(yaml.safe_dump({"mutants": {"code_of_ours.py": list(entries)}}))
    command = [sys.executable, "tools/mutants.py", "--root", str(repository), "--list", str(listed), "--jobs", "2"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.one_core
@pytest.mark.slow
def test_survivors_are_told_and_the_repository_stays_as_it_is(repository):
    done = plant(repository, NOTICED, SURVIVES, CANNOT_TELL)
    assert done.returncode == 1, done.stderr
    *lines, survivor, last = done.stdout.splitlines()
    assert sorted(line[:8] for line in lines) == ["SURVIVED", "noticed "]
    assert survivor == "survived: code_of_ours.py:6: half is a third"
    assert last.startswith("1 of 2 planted bugs were noticed, 50.0%; 1 more")
    assert (repository / "code_of_ours.py").read_text() == CODE
    assert plant(repository, NOTICED, CANNOT_TELL).returncode == 0


def outcomes_of(repository: Path, folder: Path, *mutants_: Mutant) -> list[bool]:
    folder.mkdir()
    return [one.killed for one in mutants.run_all([*mutants_], repository, folder, jobs=1)]


@pytest.mark.verify
def test_a_slow_machine_notices_no_bug(repository, monkeypatch):
    """Tests that run out of time say something about a bug only if they end without it."""
    monkeypatch.setattr(mutants, "TIMEOUT_S", 4.0)  # the tests of one bug
    start = {"file": "code_of_ours.py", "old": "    return x / 2\n", "breaks": "it", "tests": ("test_slow.py",)}
    hangs = Mutant(**start, new="    while True:\n        pass\n")
    harmless = Mutant(**start, new="    return x / 2.0\n")
    test = repository / "unit_tests" / "test_slow.py"
    test.write_text("from code_of_ours import half\n\n\ndef test_half():\n    assert half(4) == 2\n")
    assert outcomes_of(repository, repository / "build1", hangs, harmless) == [True, False]
    # the first time with the bug takes too long, and so does every later time, or none of them
    for n, slow in enumerate(("> 1", "== 2")):
        test.write_text(SLOWER.replace("> 1", slow))
        assert outcomes_of(repository, repository / f"build2{n}", harmless) == [False]


SLOWER = """import pathlib, time
from code_of_ours import half


def test_half():
    with pathlib.Path("times").open("a") as file:
        file.write("x")
    time.sleep(10 if len(pathlib.Path("times").read_text()) > 1 else 0)
    assert half(4) == 2
"""


@pytest.mark.one_core
@pytest.mark.slow
def test_a_bug_by_which_nothing_can_be_imported_is_noticed(repository):
    broken = Mutant(
        file="code_of_ours.py", old="def double(x):", new="1 / 0\ndef double(x):", breaks="it", tests=("test_code.py",)
    )
    assert outcomes_of(repository, repository / "build", broken) == [True]


def test_only_the_processes_that_were_given_are_waited_for():
    """In a container the program may be process 1, and is then the parent of whatever lost its own."""
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)
    asked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"], start_new_session=True)
    assert wait_for_one({asked.pid: time.monotonic() + 60}) == (asked.pid, 0)
    assert other.wait(10) == 3


@pytest.mark.verify
@pytest.mark.timeout(7200)
def test_nearly_every_planted_bug_is_noticed():
    done = subprocess.run([sys.executable, "tools/mutants.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
