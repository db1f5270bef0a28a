"""Which tests run a line: recorded once per state of the repository by coverage.py, child processes included."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import coverage

from tools.mutants import copy_repository

Tier = Literal["fast", "slow"]
HERE = Path("tools/drawn_mutants")
MARKS: dict[Tier, str] = {"fast": "not slow and not verify and not gpu", "slow": "slow and not verify and not gpu"}

ENDLESS = "unit_tests/configs/test_hostile_inputs.py::test_an_endless_import_ends_with_file_and_line"
"""Test that does not end under coverage. A line that only it runs counts as one that no test runs."""
UNSEEN: dict[str, tuple[str, ...]] = {
    "rewards/sandbox/inside/": (
        "unit_tests/rewards/test_code_reward.py",
        "unit_tests/rewards/test_sandbox.py",
        "unit_tests/rollouts/test_python_tool.py",
    ),
}
"""Test files of code that runs where coverage cannot write: in a sandbox."""


@dataclass(frozen=True)
class Record:
    """Lines that the tests of a tier run, and how long each test takes."""

    folder: Path
    root: Path
    """Repository whose lines these are."""

    @cached_property
    def failed(self) -> set[str]:
        """Test functions that failed while they were recorded: nothing follows from their failures."""
        cases = ElementTree.parse(self.folder / "tests.xml").iter("testcase")
        return {name_of(case) for case in cases if {"failure", "error"} & {part.tag for part in case}}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of each test function, over all its parameters, by its name as pytest takes it."""
        found: defaultdict[str, float] = defaultdict(float)
        for case in ElementTree.parse(self.folder / "tests.xml").iter("testcase"):
            found[name_of(case)] += float(case.attrib["time"])
        return found

    def find_tests(self, file: str, line: int, budget_s: float) -> list[str]:
        """Return the test functions that run a line, those of the same folder first, the short ones first.

        A line that runs at import only is seen by every test that runs another line of the file. budget_s: seconds
        that the tests may take together; one test is returned in any case.
        """
        by_line = self._of_file(file)
        span = find_span(self._tree_of(file), line)
        tests = {test for at in span for test in by_line.get(at, set())}
        for part, homes in UNSEEN.items():
            if file.startswith(part):
                tests = {test for test in self.seconds if test.startswith(homes)}
        if self._runs_at_import(file, line):
            tests = tests | {test for seen in by_line.values() for test in seen}
        home = f"unit_tests/{file.split('/')[0]}/"
        chosen: list[str] = []
        spent = 0.0
        for test in sorted(
            tests - self.failed, key=lambda test: (not test.startswith(home), self.seconds.get(test, 0.0))
        ):
            spent += self.seconds.get(test, 0.0)
            if chosen and spent > budget_s:
                break
            chosen.append(test)
        return chosen

    @cached_property
    def _data(self) -> coverage.CoverageData:
        data = coverage.CoverageData(str(self.folder / "lines"))
        data.read()
        return data

    def _of_file(self, file: str) -> dict[int, set[str]]:
        seen = self._data.contexts_by_lineno(file)
        # a context is test|phase, or nothing at import
        return {line: {c.partition("[")[0].partition("|")[0] for c in contexts if c} for line, contexts in seen.items()}

    def _tree_of(self, file: str) -> ast.Module:
        return parse(self.root / file)

    def _runs_at_import(self, file: str, line: int) -> bool:
        """Return whether a line stands outside of every function's body."""
        nodes = ast.walk(self._tree_of(file))
        inside = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        return not any(node.body[0].lineno <= line <= (node.end_lineno or 0) for node in inside)


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def find_span(tree: ast.Module, line: int) -> range:
    """Return the lines of the statement at a line; of one that holds others, the lines before those.

    Coverage knows the lines at which something is computed, and a bug may stand on another line of the statement.
    """
    spans: list[range] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
            body: list[ast.stmt] = getattr(node, "body", [])
            end = body[0].lineno - 1 if body else (getattr(node, "end_lineno", None) or first)
            if first <= line <= max(first, end):
                spans.append(range(first, max(first, end) + 1))
    return min(spans, key=len, default=range(line, line + 1))


def name_of(case: ElementTree.Element) -> str:
    """Return the name of a test function, as pytest takes it, of a case of tests.xml."""
    *packages, name = case.attrib["classname"].split(".")
    # a class of tests, such as a state machine of hypothesis
    inside = f"::{name}" if name[0].isupper() else f"/{name}"
    file = "/".join(packages) + (f".py{inside}" if name[0].isupper() else f"{inside}.py")
    return f"{file}::{case.attrib['name'].partition('[')[0]}"


def record(root: Path, kept: Path, tier: Tier) -> Record:
    """Run the tests of a tier under coverage, unless this was done for these files. kept: folder of the records.

    They run in a copy of the repository, as bugs are planted in copies: what fails there is known from then on.
    """
    folder = (kept / hash_files(root) / tier).absolute()
    if not (folder / "tests.xml").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="lines_", ignore_cleanup_errors=True) as made:
            home = Path(made) / "copy"
            copy_repository(root, home)
            run_tests(home, folder, tier)
    return Record(folder, root)


def run_tests(home: Path, folder: Path, tier: Tier) -> None:
    """Run the tests of a tier under coverage, and write the lines and the times into a folder."""
    config = home / HERE / "coverage.ini"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "COVERAGE_FILE": str(folder / "lines"),
        "PYTHONPATH": os.pathsep.join([str(home / HERE / "child"), str(home)]),
        "LINES_CONFIG": str(config),
    }
    workers = "auto" if tier == "fast" else "1"
    command = [sys.executable, "-m", "pytest", "-q", "-m", MARKS[tier], "-n", workers, "--dist", "worksteal"]
    command += ["-p", "keep_tracing", "--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
    command += [f"--junitxml={folder / 'running.xml'}", "--timeout", "300", f"--deselect={ENDLESS}"]
    subprocess.run(command, cwd=home, env=environment, check=False)
    children = sorted(map(str, folder.glob("lines.*")))
    whole = coverage.Coverage(data_file=str(folder / "lines"), config_file=str(config))
    if children:
        whole.load()
        whole.combine(children)
        whole.save()
    (folder / "running.xml").rename(folder / "tests.xml")


def hash_files(root: Path) -> str:
    """Return a short hash of all Python files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.py"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    digest = hashlib.sha1(usedforsecurity=False)
    for name in sorted(filter(None, names)):
        if (root / name).is_file():
            digest.update(f"{name}\0".encode() + (root / name).read_bytes())
    return digest.hexdigest()[:12]
