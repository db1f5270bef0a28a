"""Draw bugs by rule and see whether the tests notice: python -m tools.drawn_mutants

    python -m tools.drawn_mutants                             a sample of 300 over all product folders
    python -m tools.drawn_mutants --seeds 1 2 3               three samples, pooled
    python -m tools.drawn_mutants --only trainers --size 100  of one folder
    python -m tools.drawn_mutants --tier slow --size 20       lines that only slow tests run

A line is drawn first, by the seed, then one bug of its rules (rules.py). Only tests that run the line are asked, the
short ones first: those of the folder's own test files for two seconds, then for twenty, then for forty with those of
the test files that import the module, make whole runs or compare the generated pages. A line that no fast test runs is
left to the slow tier, where one that no test runs counts as a bug that survived. equivalent.yaml explains bugs that
nobody could notice; they leave the count. It prints the share noticed by folder with its 95 % interval (Wilson). Exit
code 1 where the lower end is below 0.90, or where more than 5 % of the sample are explained away.

What was recorded and noticed is kept in build/drawn_mutants, for one state of the code: a run that was stopped goes on
where it was, and bugs whose tests have changed are planted again.

Run it on a machine that you can lose, not as root: a bug in code that removes or shuts folders has done so with /tmp
and /proc. PYTHONUNBUFFERED hides bugs of what is not flushed, so it is unset.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import os
import random
import resource
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import yaml

from tools.drawn_mutants.lines import Record, Tier, hash_files, record
from tools.drawn_mutants.outcomes import Outcomes
from tools.drawn_mutants.rules import Edit, find_edits
from tools.mutants import CORES, LIST, ROOT, Mutant, read_list, run_all

FOLDERS = (
    *("algs", "analysis", "configs", "core", "data_feeds", "data_prep"),
    *("driver", "modeling", "rewards", "rollouts", "trainers"),
)
RUNS = ("driver", "tools/test_docs.py")
"""Test files that run or read the code of all folders."""
EXPLAINED = Path(__file__).parent / "equivalent.yaml"
KEPT = ROOT / "build" / "drawn_mutants"
WANTED = 0.90
MOST_EXPLAINED = 0.05
BUDGETS_S = (2.0, 20.0, 40.0)
"""Seconds of tests per bug: of all, and then, with those before, of those that have survived so far."""
SLOW_BUDGET_S = 60.0
START_S = 20.0
"""Seconds for a bug's process to import everything, on a busy machine."""


def draw(sources: dict[str, str], seed: int, size: int) -> Iterator[tuple[str, Edit]]:
    """Yield `size` bugs, each as its file and edit: the lines without replacement, then one bug of each."""
    lines: defaultdict[tuple[str, int], list[Edit]] = defaultdict(list)
    for file, source in sources.items():
        for edit in find_edits(source):
            lines[file, edit.line].append(edit)
    chance = random.Random(seed)
    for file, line in chance.sample(sorted(lines), min(size, len(lines))):
        edits = [edit for edit in lines[file, line] if is_python(edit.apply(sources[file]))]
        if edits:
            yield file, chance.choice(edits)


def is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def describe(edit: Edit, source: str) -> str:
    """Return a bug in one line: rule, old text, new text."""
    old = source.encode()[edit.begin : edit.end].decode()
    return f"{edit.rule}: {' '.join(old.split())!r} -> {' '.join(edit.text.split())!r}"


@cache
def read_explained() -> dict[tuple[str, str, str], str]:
    """Return the reasons of equivalent.yaml, by file, line and bug."""
    listed: list[dict[str, str]] = yaml.safe_load(EXPLAINED.read_text()) or []
    return {(one["file"], one["line"], one["bug"]): one["why"] for one in listed}


def find_explained(file: str, edit: Edit, source: str) -> str:
    """Return the reason why nobody could notice a bug, or ""."""
    line = source.splitlines()[edit.line - 1].strip()
    return read_explained().get((file, line, describe(edit, source)), "")


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the ends of Wilson's interval of a share."""
    share, middle = hits / total, hits / total + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)


def make_table(noticed: dict[str, list[bool]]) -> list[str]:
    """Return the share noticed by folder, and of all."""
    every = [one for found in noticed.values() for one in found]
    rows = [*sorted(noticed.items()), ("all", every)]
    return [f"{'folder':12} {'bugs':>5} {'noticed':>8}  95 % interval"] + [
        f"{name:12} {len(found):5} {sum(found) / len(found):8.1%}  {low:.1%} to {high:.1%}"
        for name, found in rows
        for low, high in [wilson(sum(found), len(found))]
    ]


def main() -> int:
    """Draw bugs, plant them and print the tables, as the command line says; return the exit code."""
    args = read_arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.pop("PYTHONUNBUFFERED", None)
    # once here, and not in every fork that runs tests
    for module in read_list(LIST)[1]:
        importlib.import_module(module)
    tier: Tier = args.tier
    sources = read_sources(args.only)
    drawn = [Bug(file, edit, sources[file]) for seed in args.seeds for file, edit in draw(sources, seed, args.size)]
    planted = [bug for bug in drawn if not find_explained(bug.file, bug.edit, bug.source)]
    explained = len(drawn) - len(planted)
    judge = Judge(tier, args.jobs, Outcomes(KEPT / f"{hash_files(ROOT)}-{tier}" / "outcomes.jsonl", ROOT))
    noticed: dict[str, list[bool]] = defaultdict(list)
    for bug in judge.find_noticed(planted):
        noticed[bug.file.split("/")[0]].append(bool(bug.by))
        print(f"noticed  {bug.by}: {bug}" if bug.by else f"SURVIVED {bug}", flush=True)
    print(*make_table(noticed), sep="\n")
    every = [one for found in noticed.values() for one in found]
    print(f"{explained} more cannot be noticed (equivalent.yaml)")
    print(f"{len(planted) - len(every)} more belong to the {'slow' if tier == 'fast' else 'fast'} tier")
    recording_s = used_cpu_s() - judge.used_s
    print(f"{judge.used_s:.0f} CPU seconds to plant bugs and {recording_s:.0f} to record lines, since this start")
    enough = wilson(sum(every), len(every))[0] >= WANTED
    return 0 if enough and explained <= MOST_EXPLAINED * len(drawn) else 1


def read_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.drawn_mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--size", type=int, default=300, help="bugs of each seed (default %(default)s)")
    parser.add_argument("--only", nargs="+", default=FOLDERS, help="folders or files")
    parser.add_argument("--tier", choices=["fast", "slow"], default="fast", help="tests that are asked")
    parser.add_argument("--jobs", type=int, default=min(4, CORES), help="bugs at the same time (default %(default)s)")
    return parser.parse_args()


def read_sources(parts: Iterable[str]) -> dict[str, str]:
    """Return the text of each Python file of some folders or files, by its path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for part in parts
        for path in sorted((ROOT / part).rglob("*.py") if (ROOT / part).is_dir() else [ROOT / part])
    }


def used_cpu_s() -> float:
    """Return the CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Bug:
    """Drawn bug."""

    file: str
    edit: Edit
    source: str
    by: str = ""
    """Test that noticed it."""

    def __str__(self) -> str:
        return f"{self.file}:{self.edit.line}: {describe(self.edit, self.source)}"

    def is_run(self, lines: Record) -> bool:
        return bool(lines.find_tests(self.file, self.edit.line, 0.0))

    def choose_tests(self, lines: Record, budget_s: float, asked: set[str]) -> Mutant:
        """Return the bug with the tests that fit a budget, but those that were asked before; add them to `asked`."""
        tests = [test for test in lines.find_tests(self.file, self.edit.line, budget_s) if test not in asked]
        asked.update(tests)
        return Mutant(
            file=self.file,
            # the whole text, because a mutant's old text occurs once
            old=self.source,
            new=self.edit.apply(self.source),
            breaks=str(self),
            tests=tuple(test.removeprefix("unit_tests/") for test in tests),
            slow=lines.tier == "slow",
            timeout_s=START_S + 5 * sum(lines.seconds.get(test, 0.0) for test in tests),
        )


@dataclass
class Judge:
    """Planting of drawn bugs."""

    tier: Tier
    jobs: int
    outcomes: Outcomes
    used_s: float = 0.0
    """CPU seconds of the tests of planted bugs."""
    left: list[Bug] = field(default_factory=list[Bug])
    """Bugs that no test has noticed so far."""
    asked: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Tests that were asked about a bug so far."""

    def find_noticed(self, bugs: list[Bug]) -> Iterator[Bug]:
        """Yield the bugs of the tier, each with the test that noticed it, if any."""
        self.left = bugs
        near = self.record("fast", folders={bug.file.rpartition("/")[0] for bug in bugs})
        if self.tier == "fast":
            yield from self.ask(near, BUDGETS_S[0])
            yield from self.ask(near, BUDGETS_S[1])
        else:
            self.left = [bug for bug in bugs if not bug.is_run(near)]
        far = self.record("fast", modules={bug.file for bug in self.left}, folders=RUNS)
        if self.tier == "fast":
            yield from self.ask(far, BUDGETS_S[2])
            yield from (bug for bug in self.left if bug.is_run(near) or bug.is_run(far))
            return
        self.left = [bug for bug in self.left if not bug.is_run(far)]
        slow = self.record("slow", modules={bug.file for bug in self.left}, folders={""})
        yield from self.ask(slow, SLOW_BUDGET_S)
        yield from self.left

    def record(self, tier: Tier, *, folders: Iterable[str] = (), modules: Iterable[str] = ()) -> Record:
        return record(ROOT, KEPT, tier, jobs=self.jobs, folders=folders, modules=modules)

    def ask(self, lines: Record, budget_s: float) -> Iterator[Bug]:
        """Plant each bug that is left, and yield those that tests notice."""
        by_name = {str(bug): bug for bug in self.left}
        chosen = [bug.choose_tests(lines, budget_s, self.asked[name]) for name, bug in by_name.items()]
        mutants = [mutant for mutant in chosen if mutant.tests]
        known = {mutant.breaks: by for mutant in mutants if (by := self.outcomes.find(mutant)) is not None}
        yield from (replace(by_name.pop(bug), by=by) for bug, by in known.items() if by)
        new = [mutant for mutant in mutants if mutant.breaks not in known]
        before = used_cpu_s()
        with tempfile.TemporaryDirectory(prefix="drawn_", ignore_cleanup_errors=True) as copies:
            for outcome in run_all(new, ROOT, Path(copies), jobs=self.jobs, known_to_pass=True):
                self.outcomes.add(outcome.mutant, outcome.by if outcome.killed else "")
                if outcome.killed:
                    yield replace(by_name.pop(outcome.mutant.breaks), by=outcome.by)
        self.left = list(by_name.values())
        self.used_s += used_cpu_s() - before


if __name__ == "__main__":
    sys.exit(main())
