"""Draw bugs by rule and see whether the tests notice: python -m tools.drawn_mutants

    python -m tools.drawn_mutants                             a sample of 300 over all product folders
    python -m tools.drawn_mutants --seeds 1 2 3               three samples, pooled
    python -m tools.drawn_mutants --only trainers --size 100  of one folder
    python -m tools.drawn_mutants --tier slow --size 20       lines that only slow tests run

A line is drawn first, by the seed, then one bug of its rules (rules.py). Only tests that run the line are asked, for at
most a minute. A line that no fast test runs is left to the slow tier, where one that no test runs counts as a bug that
survived. equivalent.yaml explains bugs that nobody could notice; they leave the count. It prints the share noticed by
folder with its 95 % interval (Wilson). Exit code 1 where the lower end is below 0.90, or where more than 5 % of the
sample are explained away.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from tools.drawn_mutants.lines import Record, Tier, record
from tools.drawn_mutants.rules import Edit, find_edits
from tools.mutants import CORES, LIST, ROOT, Mutant, Outcome, read_list, run_all

FOLDERS = (
    *("algs", "analysis", "configs", "core", "data_feeds", "data_prep"),
    *("driver", "modeling", "rewards", "rollouts", "trainers"),
)
EXPLAINED = Path(__file__).parent / "equivalent.yaml"
WANTED = 0.90
MOST_EXPLAINED = 0.05
BUDGET_S = 60.0
"""Seconds of tests per bug."""


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
    parser = argparse.ArgumentParser(prog="python -m tools.drawn_mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--size", type=int, default=300, help="bugs of each seed (default %(default)s)")
    parser.add_argument("--only", nargs="+", default=FOLDERS, help="folders or files")
    parser.add_argument("--tier", choices=["fast", "slow"], default="fast", help="tests that are asked")
    parser.add_argument("--jobs", type=int, default=min(4, CORES), help="bugs at the same time (default %(default)s)")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    tier: Tier = args.tier
    kept = ROOT / "build" / "drawn_mutants"
    fast = record(ROOT, kept, "fast")
    lines = fast if tier == "fast" else record(ROOT, kept, tier)
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for part in args.only
        for path in sorted((ROOT / part).rglob("*.py") if (ROOT / part).is_dir() else [ROOT / part])
    }
    drawn = [one for seed in args.seeds for one in draw(sources, seed, args.size)]
    # each bug is in one tier: what the fast tests run is theirs to notice
    everywhere = len(drawn)
    drawn = [(file, edit) for file, edit in drawn if (tier == "fast") == bool(fast.find_tests(file, edit.line, 0.0))]
    explained = [find_explained(file, edit, sources[file]) for file, edit in drawn]
    noticed: dict[str, list[bool]] = defaultdict(list)
    asked: list[Mutant] = []
    for (file, edit), why in zip(drawn, explained, strict=True):
        if why:
            continue
        mutant = make_mutant(file, edit, sources[file], lines)
        if mutant.tests:
            asked.append(mutant)
        else:
            noticed[file.split("/")[0]].append(False)
            print(f"SURVIVED, no test runs it: {mutant.breaks}", flush=True)
    for outcome in plant(asked, args.jobs):
        noticed[outcome.mutant.file.split("/")[0]].append(outcome.killed)
        told = f"noticed  {outcome.by}: " if outcome.killed else "SURVIVED "
        print(f"{told}{outcome.mutant.breaks}, {outcome.seconds:.1f} s", flush=True)
    print(*make_table(noticed), sep="\n")
    print(f"{sum(map(bool, explained))} more cannot be noticed (equivalent.yaml)")
    print(f"{everywhere - len(drawn)} more of {everywhere} belong to the {'slow' if tier == 'fast' else 'fast'} tier")
    every = [one for found in noticed.values() for one in found]
    enough = wilson(sum(every), len(every))[0] >= WANTED
    return 0 if enough and sum(map(bool, explained)) <= MOST_EXPLAINED * len(drawn) else 1


def make_mutant(file: str, edit: Edit, source: str, lines: Record) -> Mutant:
    tests = [test.removeprefix("unit_tests/") for test in lines.find_tests(file, edit.line, BUDGET_S)]
    return Mutant(
        file=file,
        # the whole text, because a mutant's old text occurs once
        old=source,
        new=edit.apply(source),
        breaks=f"{file}:{edit.line}: {describe(edit, source)}",
        tests=tuple(tests),
        slow="slow" in lines.folder.name,
    )


def plant(mutants: list[Mutant], jobs: int) -> Iterator[Outcome]:
    """Plant each bug alone, and yield what became of it."""
    sys.dont_write_bytecode = True
    for module in read_list(LIST)[1]:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="drawn_", ignore_cleanup_errors=True) as folder:
        yield from run_all(mutants, ROOT, Path(folder), jobs=jobs, known_to_pass=True)


if __name__ == "__main__":
    sys.exit(main())
