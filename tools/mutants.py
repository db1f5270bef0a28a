"""Plant bugs of a list into a copy of the repository, one at a time, and see whether the tests notice: make mutants

    python tools/mutants.py                     all of tools/mutants.yaml
    python tools/mutants.py --fast              those that the fast tests must notice
    python tools/mutants.py --only algs/ops     those of the files whose path holds this text

A line of the list is a small change of one file that no user would want, with the tests that should fail then. A bug
that they do not notice has survived: somebody could write it tomorrow. Exit code 1 where fewer than 97 % are noticed,
or where the list is wrong: a text that does not occur exactly once, tests that fail without any bug, or that are none.

Everything heavy is imported once. Each bug then gets a process of its own, forked from this one: it has torch, but has
not imported anything of the repository yet.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tools.forks import fork_to

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "mutants.yaml"
WANTED = 0.97
TIMEOUT_S = 300.0
"""Seconds that the tests of a bug may take."""
ALL_PASSED, SOME_FAILED, OUT_OF_TIME = 0, 1, -1000
"""Exit codes of pytest, and what stands in place of one."""
CORES = len(os.sched_getaffinity(0))


class ListIsWrong(Exception):
    """Error of the list or of its tests, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Planted bug."""

    file: str
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    breaks: str
    """What goes wrong with it."""
    tests: tuple[str, ...] = ()
    """Files of unit_tests/ or tests in them that should notice, as pytest takes them."""
    equivalent: str = ""
    """Why nobody could tell the difference; then it is not planted."""
    slow: bool = False
    """True if only tests with an engine or several processes notice."""
    timeout_s: float = 0.0
    """Seconds that its tests may take; 0 for TIMEOUT_S."""

    @property
    def options(self) -> list[str]:
        """Options of pytest: stop at the first failure, and which marks run."""
        return ["-x", *(["-m", "not gpu"] if self.slow else [])]

    def plant(self, text: str) -> str:
        """Return the file's text with the bug. Raises ListIsWrong unless the old text occurs once."""
        if (found := text.count(self.old)) != 1:
            raise ListIsWrong(f"{self.file}: the old text occurs {found} times instead of once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a planted bug."""

    mutant: Mutant
    line: int
    killed: bool
    seconds: float
    by: str = ""
    """First test that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tests that run in a copy of the repository."""

    mutant: Mutant
    home: Path
    since: float
    planted: bool = True
    """False where the same tests run without the bug."""
    is_last: bool = False
    """True where they run with the bug for the second time."""

    @property
    def deadline(self) -> float:
        return self.since + (self.mutant.timeout_s or TIMEOUT_S)


def read_list(path: Path) -> tuple[list[Mutant], list[str]]:
    """Return the mutants of a list, and the modules to import before the first."""
    whole = yaml.safe_load(path.read_text())
    mutants = [make_mutant(file, entry) for file, entries in whole["mutants"].items() for entry in entries]
    return mutants, whole.get("import_once", [])


def make_mutant(file: str, entry: dict[str, Any]) -> Mutant:
    tests = entry.get("tests", [])
    settings: dict[str, Any] = entry | {"tests": tuple([tests] if isinstance(tests, str) else tests)}
    mutant = Mutant(file=file, **settings)
    # exactly one of them: a mutant is planted, or it is explained
    if bool(mutant.tests) == bool(mutant.equivalent):
        raise ListIsWrong(f"{file}: either tests or equivalent says what becomes of {mutant.old!r}")
    return mutant


def copy_tracked(root: Path, home: Path) -> None:
    """Copy the tracked files, and the files that git would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (root / name).is_file():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, home / name)


def copy_repository(root: Path, home: Path) -> None:
    """Copy a repository, and compile it so that a file whose text changes is compiled anew.

    The copy is a repository of git too, of one commit: some tests ask for it.
    """
    copy_tracked(root, home)
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
    for words in (["init", "--quiet"], ["add", "--all"], [*who, "commit", "--quiet", "--no-verify", "-m", "a copy"]):
        subprocess.run(["git", *words], cwd=home, check=True)
    # by hash and not by time: a bug is planted and removed within the same second
    compileall.compile_dir(home, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def start_tests(home: Path, tests: list[str], options: list[str], *, log: Path, path: tuple[Path, ...] = ()) -> int:
    """Run tests of the copy in `home`, in a process of its own; return its number. Its exit code is pytest's.

    path: folders that come before the copy in sys.path, also in the processes that the tests start.
    """

    def run() -> int:
        # a session of its own, so that everything that the tests start can be killed as a group
        os.setsid()
        with log.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.chdir(home)
        # also where a test starts a process in another folder
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, [*path, home]))
        # the tests' compiled files are kept for the next bug; those of the code go by hash
        sys.dont_write_bytecode = False
        sys.path[:] = [
            *map(str, [*path, home]),
            # the original must not be importable, or the tests would run without the bug
            *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tools")),
        ]
        import pytest

        named = [f"unit_tests/{test}" for test in tests]
        return int(pytest.main(["-q", "-p", "no:cacheprovider", f"--basetemp={log}.tmp", *options, *named]))

    return fork_to(run)


def kill_all_of(pid: int) -> None:
    """End a process and all that it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_for_one(deadlines: dict[int, float]) -> tuple[int, int]:
    """Wait until a process ends, or kill one at its deadline. Return its number and its exit code."""
    while True:
        for pid, deadline in deadlines.items():
            # polled, because a blocking wait could not kill a process that runs for too long
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() <= deadline:
                continue
            kill_all_of(pid)  # what a test left running
            if ended:
                return pid, os.waitstatus_to_exitcode(status)
            os.waitpid(pid, 0)
            return pid, OUT_OF_TIME
        time.sleep(0.02)


def check_without_bugs(mutants: list[Mutant], home: Path) -> None:
    """Raise ListIsWrong where the tests of the list fail although nothing is planted, or do not exist."""
    # apart, because fast tests run with pytest's usual marks and slow ones with all but gpu
    for slow in (False, True):
        alike = [m for m in mutants if m.slow == slow]
        tests = list(dict.fromkeys(test for m in alike for test in m.tests))
        if tests:
            log = home.parent / "none.log"
            pid = start_tests(home, without_parts(tests), alike[0].options, log=log)
            _, code = wait_for_one({pid: time.monotonic() + 40 * TIMEOUT_S})
            if code != ALL_PASSED:
                raise ListIsWrong(f"without any bug the tests give exit code {code}:\n{log.read_text()[-3000:]}")


def without_parts(tests: list[str]) -> list[str]:
    """Leave out tests of a file that is in the list as a whole.

    >>> without_parts(["a.py::b", "a.py", "c.py::d"])
    ['a.py', 'c.py::d']
    """
    return [test for test in tests if "::" not in test or test.partition("::")[0] not in tests]


def run_all(
    mutants: list[Mutant], root: Path, folder: Path, *, jobs: int, known_to_pass: bool = False
) -> Iterator[Outcome]:
    """Plant each bug alone in one of `jobs` copies below `folder`; yield what became of it.

    Tests that run out of time or end without a verdict run again without the bug, and once more with it: they must pass
    without it, and never with it, or the machine was noticed. known_to_pass: all tests have passed without a bug.
    """
    homes = [folder / f"copy{n}" for n in range(min(jobs, len(mutants)))]
    for home in homes:
        copy_repository(root, home)
    if not known_to_pass:
        check_without_bugs(mutants, homes[0])
    # reversed, because pop takes from the end
    left, running = list(reversed(mutants)), dict[int, Run]()
    try:
        while left or running:
            while left and homes:
                mutant, home = left.pop(), homes.pop()
                run = Run(mutant=mutant, home=home, since=time.monotonic())
                running[start_tests_of(run, root)] = run
            pid, code = wait_for_one({pid: run.deadline for pid, run in running.items()})
            run = running.pop(pid)
            (run.home / run.mutant.file).write_text((root / run.mutant.file).read_text())
            if (again := choose_next(run, code)) is not None:
                running[start_tests_of(again, root)] = again
                continue
            homes.append(run.home)
            yield judge(run, code, root, time.monotonic() - run.since)
    finally:
        for pid in running:
            kill_all_of(pid)


def choose_next(run: Run, code: int) -> Run | None:
    """Return the run of the same tests that decides what an exit code means; None after the last."""
    if not run.planted:
        return replace(run, since=time.monotonic(), planted=True, is_last=True) if code == ALL_PASSED else None
    is_clear = run.is_last or has_verdict(code, log_of(run.home))
    return None if is_clear else replace(run, since=time.monotonic(), planted=False)


def log_of(home: Path) -> Path:
    return home.with_suffix(".log")


def start_tests_of(run: Run, root: Path) -> int:
    text = (root / run.mutant.file).read_text()
    (run.home / run.mutant.file).write_text(run.mutant.plant(text) if run.planted else text)
    return start_tests(run.home, list(run.mutant.tests), run.mutant.options, log=log_of(run.home))


def has_verdict(code: int, log: Path) -> bool:
    """Return whether tests passed or failed, rather than crashed or ran out of time. log: what pytest said."""
    return code == ALL_PASSED or (code == SOME_FAILED and "from pytest-timeout" not in log.read_text(errors="replace"))


def judge(run: Run, code: int, root: Path, seconds: float) -> Outcome:
    """Return whether the tests noticed a mutant, by their exit code."""
    line = (root / run.mutant.file).read_text().partition(run.mutant.old)[0].count("\n") + 1
    said = log_of(run.home).read_text(errors="replace")
    if not run.planted and code not in (SOME_FAILED, OUT_OF_TIME):
        raise ListIsWrong(f"{run.mutant.file}:{line}: without the bug pytest ended with code {code}:\n{said[-3000:]}")
    killed = run.planted and code != ALL_PASSED
    failed = re.findall(r"^(?:FAILED|ERROR) unit_tests/(\S+)", said, re.MULTILINE)
    by = failed[0] if failed else "no test, but the end of pytest" if killed else ""
    return Outcome(mutant=run.mutant, line=line, killed=killed, seconds=seconds, by=by)


def summarize(outcomes: list[Outcome], equivalent: int) -> tuple[list[str], bool]:
    """Return the last lines of the report, and whether enough were noticed."""
    survived = [o for o in outcomes if not o.killed]
    share = 1 - len(survived) / len(outcomes)
    told = [f"survived: {o.mutant.file}:{o.line}: {o.mutant.breaks}" for o in survived]
    told.append(
        f"{len(outcomes) - len(survived)} of {len(outcomes)} planted bugs were noticed, {share:.1%}; {equivalent} more "
        "change nothing that anybody could see"
    )
    return told, share >= WANTED


def main() -> None:
    """Plant the chosen bugs and print which were noticed. Exits with 1 if too few were, or the list is wrong."""
    parser = argparse.ArgumentParser(prog="python tools/mutants.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fast", action="store_true", help="leave out those that need an engine")
    parser.add_argument("--only", default="", help="text that the path of the file or what it breaks must hold")
    parser.add_argument("--jobs", type=int, default=min(4, CORES), help="bugs at the same time (default %(default)s)")
    parser.add_argument("--list", type=Path, default=LIST, help="default tools/mutants.yaml")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to copy (default: this one)")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.dont_write_bytecode = True
    try:
        listed, import_once = read_list(args.list)
        for mutant in listed:
            mutant.plant((args.root / mutant.file).read_text())
        chosen = [m for m in listed if args.only in f"{m.file}: {m.breaks}" and not (args.fast and m.slow)]
        planted = [m for m in chosen if m.tests]
        if not planted:
            raise ListIsWrong(f"no bug of {args.list} is chosen by --only {args.only!r}")
        for module in import_once:
            importlib.import_module(module)
        outcomes: list[Outcome] = []
        with tempfile.TemporaryDirectory(prefix="mutants_", ignore_cleanup_errors=True) as folder:
            for o in run_all(planted, args.root, Path(folder), jobs=args.jobs):
                outcomes.append(o)
                told = "noticed " if o.killed else "SURVIVED"
                print(f"{told} {o.seconds:5.1f} s  {o.mutant.file}:{o.line}: {o.mutant.breaks}", flush=True)
    except ListIsWrong as error:
        sys.exit(f"error: {error}")
    told, enough = summarize(outcomes, len(chosen) - len(planted))
    print(*told, sep="\n")
    sys.exit(0 if enough else 1)


if __name__ == "__main__":
    main()
