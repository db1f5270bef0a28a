"""Record of the lines that each test runs, by coverage.py, child processes included: once per test file and code."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Literal

import coverage

from tools.forks import fork_to
from tools.mutants import copy_repository, start_tests, wait_for_one

Tier = Literal["fast", "slow"]
HERE = Path("tools/drawn_mutants")
MARKS: dict[Tier, str] = {"fast": "not slow and not verify and not gpu", "slow": "slow and not verify and not gpu"}

ENDLESS = "unit_tests/configs/test_hostile_inputs.py::test_an_endless_import_ends_with_file_and_line"
"""Test that does not end under coverage. A line that only it runs counts as one that no test runs."""
UNSEEN: dict[str, tuple[str, ...]] = {
    "core/cluster/guardian.py": ("unit_tests/core/test_scratch.py",),
    "rewards/sandbox/inside/": (
        "unit_tests/rewards/test_inside.py",
        "unit_tests/rewards/test_code_reward.py",
        "unit_tests/rewards/test_sandbox.py",
        "unit_tests/rollouts/test_python_tool.py",
    ),
}
"""Test files of code that runs where coverage cannot write: in a sandbox, or in a Python without site-packages."""
PAGES = "unit_tests/tools/test_docs.py::test_generated_pages_are_what_the_code_says"
"""Test that compares the tables of all modules with the documentation."""
FILE_S = 0.3
"""Seconds to import a test file."""
LONG_S = 2.0
"""Seconds from which the cases of a parametrized test are chosen one by one."""
FILE_TIMEOUT_S = 1200.0
"""Seconds that a test file may take under coverage."""


@dataclass(frozen=True)
class Record:
    """Lines that the tests of a tier run, and how long each test takes."""

    tier: Tier
    folders: tuple[Path, ...]
    """One of each test file."""
    root: Path
    """Repository whose lines these are."""

    @cached_property
    def _cases_by_folder(self) -> list[list[ElementTree.Element]]:
        return [read_cases(folder / "tests.xml") for folder in self.folders]

    @cached_property
    def _cases(self) -> list[ElementTree.Element]:
        return [case for cases in self._cases_by_folder for case in cases]

    @cached_property
    def failed(self) -> set[str]:
        """Test functions that failed while they were recorded: nothing follows from their failures."""
        return {name_of(case) for case in self._cases if {"failure", "error"} & {part.tag for part in case}}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of each test function over all its cases, and of each case, by the name as pytest takes it."""
        found: defaultdict[str, float] = defaultdict(float)
        for case in self._cases:
            for name in {name_of(case), full_name_of(case)}:
                found[name] += float(case.attrib["time"])
        return found

    def _as_asked(self, case: str) -> str:
        """Return the name by which a case is asked: its own if all of its function take long, else the function's."""
        function = function_of(case)
        is_long = self.seconds.get(function, 0.0) > LONG_S and case in self.seconds
        return case if is_long else function

    def find_tests(self, file: str, line: int, budget_s: float) -> list[str]:
        """Return the tests that run a line, those of the same folder first, by file, the short ones first.

        They are functions, or cases of those that take long. budget_s: seconds that the tests may take together; one
        test is returned in any case.
        """
        chosen: list[str] = []
        spent, opened = 0.0, set[str]()
        for test in self._order(self._list_tests(file, line), file, line):
            cost = self.seconds.get(test, 0.0) + (0.0 if test.partition("::")[0] in opened else FILE_S)
            if chosen and spent + cost > budget_s:
                continue
            spent += cost
            chosen.append(test)
            opened.add(test.partition("::")[0])
        return chosen

    def _list_tests(self, file: str, line: int) -> set[str]:
        """Return the tests that run a line, but those that failed while they were recorded.

        A line that runs at import only is seen by every test that runs another line of the file, or without such a test
        by all of the test files that import it, and by the test of the generated pages.
        """
        by_line = self._of_file(file)
        span = find_span(self._tree_of(file), line)
        tests = {test for at in span for test in by_line.get(at, set())}
        for part, homes in UNSEEN.items():
            if file.startswith(part):
                names = {full_name_of(case) for case in self._cases}
                tests |= {self._as_asked(name) for name in names if name.startswith(homes)}
        if self._runs_at_import(file, line):
            tests = tests | {test for seen in by_line.values() for test in seen}
            tests = tests | {self._as_asked(name) for name in self._cases_importing(file) if name == PAGES or not tests}
        return {test for test in tests if function_of(test) not in self.failed}

    def _order(self, tests: set[str], file: str, line: int) -> list[str]:
        """Return tests of a line in the order in which they are asked.

        Of a line that runs at import only, those of test files that import the file themselves come before others.
        """
        paths = {test.partition("::")[0] for test in tests}
        own = {path for path in paths if imports(self.root / path, file)} if self._runs_at_import(file, line) else set()
        home = f"unit_tests/{file.split('/')[0]}/", PAGES
        by_file: defaultdict[str, float] = defaultdict(float)
        for test in tests:
            by_file[test.partition("::")[0]] += self.seconds.get(test, 0.0)

        def order(test: str) -> tuple[bool, bool, float, str, float]:
            path = test.partition("::")[0]
            return not test.startswith(home), path not in own, by_file[path], path, self.seconds.get(test, 0.0)

        return sorted(tests, key=order)

    @cached_property
    def _data(self) -> list[coverage.CoverageData]:
        found = [coverage.CoverageData(str(folder / "lines")) for folder in self.folders]
        for data in found:
            data.read()
        return found

    @cache  # noqa: B019 (one record per process)
    def _of_file(self, file: str) -> dict[int, set[str]]:
        found: defaultdict[int, set[str]] = defaultdict(set)
        for data in self._data:
            for line, contexts in data.contexts_by_lineno(file).items():
                # a context is test|phase, or nothing at import
                found[line] |= {self._as_asked(c.rpartition("|")[0]) for c in contexts if c}
        return found

    def _cases_importing(self, file: str) -> list[str]:
        """Return the names of the cases of all test files that import a file, directly or not."""
        beside = zip(self._cases_by_folder, self._data, strict=True)
        return [full_name_of(case) for cases, data in beside if data.lines(file) for case in cases]

    def _tree_of(self, file: str) -> ast.Module:
        return parse(self.root / file)

    def _runs_at_import(self, file: str, line: int) -> bool:
        """Return whether a line stands outside of every function's body."""
        nodes = ast.walk(self._tree_of(file))
        inside = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        return not any(node.body[0].lineno <= line <= (node.end_lineno or 0) for node in inside)


def read_cases(file: Path) -> list[ElementTree.Element]:
    """Return the tests of a tests.xml, which is empty where pytest was killed."""
    cases = ElementTree.parse(file).iter("testcase") if file.read_text() else []
    return [case for case in cases if case.attrib["classname"]]  # a file that cannot be imported has none


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


def function_of(test: str) -> str:
    """Return the name of the function of a case, as pytest takes it."""
    return test.partition("[")[0]


def name_of(case: ElementTree.Element) -> str:
    """Return the name of a test function, as pytest takes it, of a case of tests.xml."""
    *packages, name = case.attrib["classname"].split(".")
    # a class of tests, such as a state machine of hypothesis
    inside = f"::{name}" if name[0].isupper() else f"/{name}"
    file = "/".join(packages) + (f".py{inside}" if name[0].isupper() else f"{inside}.py")
    return f"{file}::{case.attrib['name'].partition('[')[0]}"


def full_name_of(case: ElementTree.Element) -> str:
    """Return the name of a case of tests.xml, with its parameters."""
    return name_of(case) + "".join(case.attrib["name"].partition("[")[1:])


def record(
    root: Path, kept: Path, tier: Tier, *, jobs: int, folders: Iterable[str] = (), modules: Iterable[str] = ()
) -> Record:
    """Run test files under coverage, each unless it was done for its text and this state of the code.

    They run in copies of the repository, as bugs are planted in copies: what fails there is known from then on.
    kept: folder of the records. folders: of code, whose own test files run. modules: files whose importers run.
    """
    code = hash_files(root)
    tests = list_test_files(root, set(folders), set(modules))
    if tier == "slow":
        # few files have slow tests, and pytest needs seconds for each of the others
        having = list_files_with(root, tier)
        tests = [path for path in tests if path in having]
    found = {path: kept / f"{code}-{tier}" / hash_text(f"{path}\0{(root / path).read_text()}") for path in tests}
    left = [path for path, folder in found.items() if not (folder / "tests.xml").is_file()]
    shares = [{path: found[path].absolute() for path in left[n::jobs]} for n in range(jobs)]
    for pid in [fork_to(partial(run_in_copy, root, share, tier)) for share in shares if share]:
        os.waitpid(pid, 0)
    if missing := [path for path in left if not (found[path] / "tests.xml").is_file()]:
        raise SystemExit(f"{len(missing)} test files were not recorded, such as {missing[0]}: see above")
    for path in left:
        if not (found[path] / "tests.xml").stat().st_size:
            print(f"{path}: pytest ended before its tests, so nobody knows which lines they run", file=sys.stderr)
    return Record(tier, tuple(found.values()), root)


def run_in_copy(root: Path, folders: dict[str, Path], tier: Tier) -> int:
    """Run test files under coverage in a copy of the repository; return 0. folders: where each one's record goes."""
    with tempfile.TemporaryDirectory(prefix="lines_", ignore_cleanup_errors=True) as made:
        home = Path(made) / "copy"
        copy_repository(root, home)
        for path, folder in folders.items():
            run_tests(home, path, folder, tier)
    return 0


def list_test_files(root: Path, folders: set[str], modules: set[str]) -> list[str]:
    """Return the test files of folders of the code, as unit_tests/ has them, and those that import some modules."""
    # a test file may be given as a folder is: it reads the code of all
    homes = {root / "unit_tests" / (folder if folder.endswith(".py") else folder.split("/")[0]) for folder in folders}
    return [
        path.relative_to(root).as_posix()
        for path in sorted((root / "unit_tests").rglob("test_*.py"))
        if homes & {path, *path.parents} or any(imports(path, module) for module in modules)
    ]


def list_files_with(root: Path, tier: Tier) -> set[str]:
    """Return the test files with tests of a tier."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", MARKS[tier]]
    listed = subprocess.run([*command, "unit_tests"], cwd=root, capture_output=True, text=True, check=True).stdout
    return {line.partition("::")[0] for line in listed.splitlines() if "::" in line}


def imports(path: Path, module: str) -> bool:
    """Return whether a file imports a module, given as a file of the repository."""
    return module.removesuffix(".py").replace("/", ".") in list_imports(parse(path))


@cache
def list_imports(tree: ast.Module) -> set[str]:
    """Return the names of the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            # a name that is imported may be a module
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def run_tests(home: Path, path: str, folder: Path, tier: Tier) -> None:
    """Run the tests of a file under coverage, and write the lines and the times into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = home / HERE / "coverage.ini"
    os.environ |= {"COVERAGE_FILE": str(folder / "lines"), "LINES_CONFIG": str(config)}
    options = ["-m", MARKS[tier], "-p", "keep_tracing", "--timeout=300", f"--deselect={ENDLESS}"]
    options += ["--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
    options += [f"--junitxml={folder / 'running.xml'}"]
    pid = start_tests(
        home, [path.removeprefix("unit_tests/")], options, log=folder / "log", path=(home / HERE / "child",)
    )
    wait_for_one({pid: time.monotonic() + FILE_TIMEOUT_S})
    del os.environ["COVERAGE_FILE"], os.environ["LINES_CONFIG"]
    shutil.rmtree(folder / "log.tmp", ignore_errors=True)
    children = sorted(map(str, folder.glob("lines.*")))
    whole = coverage.Coverage(data_file=str(folder / "lines"), config_file=str(config))
    if children:
        whole.load()
        whole.combine(children)
        whole.save()
    (folder / "running.xml").touch()
    (folder / "running.xml").rename(folder / "tests.xml")


def hash_text(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]


def hash_files(root: Path) -> str:
    """Return a short hash of the Python files that git knows or would add, without tools and those of tests alone."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.py"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    return hash_text(
        "\0".join(
            f"{name}\0{(root / name).read_text()}"
            for name in sorted(filter(None, names))
            if (root / name).is_file() and not Path(name).name.startswith("test_") and not name.startswith("tools/")
        )
    )
