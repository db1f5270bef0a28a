"""What is optional can be taken away: a clone without it trains, and a recipe that names it is refused in one sentence.

A new optional part is a row of `OPTIONAL` in tools/layers.py and a row of CASES here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools import layers
from tools.mutants import copy_tracked

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent
RUN = """
import contextlib, io, json, runpy, sys
clone = sys.argv[1]
sys.path[:] = ["", *(p for p in sys.path if p not in ("", clone))]  # the clone's link would bring back what is gone
for arguments in json.loads(sys.argv[2]):
    sys.argv[:], said = arguments, io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as done:
            print(json.dumps([done.code, said.getvalue()]))
ours = [m.__file__ for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").startswith(clone + "/")]
print(json.dumps([file for file in ours if "/site-packages/" not in file]))
"""
"""Runs programs one after another, and prints the exit code and the errors of each, and then what was imported from the
clone instead of from its copy."""
TINY = ("main_rl.py", "--config", "configs/tiny.yaml")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Recipe that names a part which is gone."""

    part: str
    command: tuple[str, ...] = ()
    """Program with its arguments, which name the part; none where no recipe can."""
    says: str = ""
    """Beginning of the sentence: the key, and the folder."""


CASES = [
    Case(
        part="agents",
        command=(*TINY, "rollout.agent={command: [ls]}"),
        says="rollout.agent needs rollouts/agents, which",
    ),
    Case(
        part="tools",
        command=(*TINY, "rollout.env=number_tools", "rollout.max_turns=3"),
        says="rollout.env=number_tools needs rollouts/tools, which",
    ),
    Case(
        part="environments",
        command=(*TINY, "rollout.env=treasure", "rollout.max_turns=3"),
        says="rollout.env: there is no 'treasure' in rollouts/envs/; it has single_turn,",
    ),
    Case(
        part="judges",
        command=(*TINY, "reward.function=judge"),
        says="reward.function=judge needs rewards/judging, which",
    ),
    Case(
        part="images",
        command=(*TINY, "model.path=models/sees"),
        says="model.path=models/sees needs modeling/images, which",
    ),
    Case(
        part="images",
        command=(*TINY, "data.train=data/tiny/images.jsonl"),
        says="data.train=data/tiny/images.jsonl, which holds images, needs data_feeds/images, which",
    ),
    Case(
        part="trackers",
        command=(*TINY, "trackers=[jsonl, wandb]"),
        says="trackers: there is no 'wandb' in driver/records/trackers/; it has jsonl,",
    ),
    Case(
        part="sandbox",
        command=(*TINY, "reward.function=code"),
        says="reward.function=code needs rewards/sandbox, which",
    ),
    Case(
        part="sandbox",
        command=(*TINY, "rollout.env=python_tool", "rollout.max_turns=3"),
        says="rollout.env=python_tool needs rewards/sandbox, which",
    ),
    Case(part="launchers"),
    Case(
        part="suites",
        command=("main_eval.py", "--config", "configs/eval_quickstart.yaml"),
        says="main_eval.py needs driver/evaluation/suites, which",
    ),
    Case(part="analysis", command=(*TINY, "capture={every: 1}"), says="capture needs analysis, which"),
    Case(
        part="analysis",
        command=(*TINY, "compare_losses=[{name: dapo}]"),
        says="compare_losses needs analysis, which",
    ),
    Case(part="analysis", command=("feynrl.py", "doctor"), says="feynrl doctor needs analysis, which"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory, tiny_path, sums) -> Path:
    """A copy of the clone, with the model and the data of configs/tiny.yaml."""
    folder = tmp_path_factory.mktemp("copy")
    copy_tracked(ROOT, folder)
    shutil.copytree(tiny_path, folder / "models/tiny")
    shutil.copytree(sums, folder / "data/tiny")
    (folder / "models/sees").mkdir()
    (folder / "models/sees/config.json").write_text('{"model_type": "idefics3"}')
    row = {"messages": "What is this?", "answer": "1", "image": "digit.png"}
    (folder / "data/tiny/images.jsonl").write_text(json.dumps(row))
    return folder


def take_away(copy: Path, part: str, aside: Path) -> list[Path]:
    """Move the files of a part out of the copy; return where they were."""
    files = [file for file in copy.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    gone = [file for file in files if layers.part_of(str(file.relative_to(copy))) == part]
    for file in gone:
        (aside / file.relative_to(copy)).parent.mkdir(parents=True, exist_ok=True)
        file.rename(aside / file.relative_to(copy))
    for folder in sorted({folder for file in gone for folder in file.parents}, reverse=True):
        if folder.is_relative_to(copy) and not any(path.suffix != ".pyc" for path in folder.rglob("*.*")):
            shutil.rmtree(folder)  # a folder without files would still be a package
    return gone


def run_all(copy: Path, commands: Sequence[Sequence[str]]) -> tuple[list[tuple[int, str]], list[str]]:
    """Run programs in the copy; return exit code and errors of each, and the files imported from the clone."""
    command = [sys.executable, "-c", RUN, str(ROOT), json.dumps(commands)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    found: list[Any] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(commands) + 1, done.stdout + done.stderr
    return found[:-1], found[-1]


def test_every_optional_part_has_a_case():
    assert {case.part for case in CASES} == {*layers.OPTIONAL}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.slow if part == "analysis" else pytest.mark.verify)
        for part in sorted(layers.OPTIONAL)
    ],
)
def test_a_clone_runs_without_a_part_and_refuses_a_recipe_that_names_it(copy, tmp_path, part):
    cases = [case for case in CASES if case.part == part and case.command]
    commands = [TINY, *(case.command for case in cases)]
    gone = take_away(copy, part, tmp_path)
    try:
        [ran, *refused], from_clone = run_all(copy, commands)
    finally:
        for file in gone:
            file.parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file.relative_to(copy)).rename(file)
    assert gone and from_clone == []
    assert ran[0] == 0, ran[1]
    for case, (code, said) in zip(cases, refused, strict=True):
        [sentence] = said.strip().splitlines()
        assert code == 2 and sentence.startswith(f"error: {case.says}"), said
