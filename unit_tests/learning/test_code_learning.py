"""The code task from end to end: the tiny model writes functions, which a real sandbox runs with their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import main_rl
import main_sl
from data_prep import code_tasks, tiny_model
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.needs_sandbox import needs_sandbox
from unit_tests.helpers.runs import metrics_of

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent


def prepare(folder: Path) -> None:
    """Make the recipe's model and data."""
    tiny_model.main(["--out", str(folder / "models/code"), "--hidden-size", "128", "--heads", "4"])
    sizes = ["--train", "300", "--eval", "50", "--sft", "226", "--copies", "24", "--wrong-share", "0.6"]
    code_tasks.main(["--out", str(folder / "data/code"), *sizes])


def train(program, recipe: str, *changes: str) -> list[dict]:
    """Run a recipe in the current folder; return its metrics."""
    code, err = run_here(program, "--config", str(ROOT / "configs" / recipe), *changes)
    assert code == 0, err
    newest = max(Path("runs").iterdir(), key=lambda run: run.stat().st_mtime)
    return metrics_of(newest)


@needs_sandbox
@pytest.mark.slow
def test_a_run_whose_reward_runs_code(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    train(main_sl, "code_tasks_sft.yaml", "backend=local")
    small = [
        "steps=2",
        "groups_per_step=4",
        "group_size=4",
        "updates_per_step=1",
        "data.eval=null",
        "trainer.warmup_updates=0",
    ]
    log = train(main_rl, "code_tasks.yaml", *small)
    assert all(line["rollout/failed"] == 0 for line in log)
    assert all(0 <= line["reward/passed"] <= line["reward/ran"] for line in log)
    assert log[-1]["reward/ran"] > 0, "after the warm-up some of what it writes is Python"


@needs_sandbox
@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_tiny_functions_are_learnt(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    train(main_sl, "code_tasks_sft.yaml", "backend=local")
    log = train(main_rl, "code_tasks.yaml", "data.eval=null")
    correct = [line["reward/correct"] for line in log]
    assert correct[0] < 0.6 and max(correct) >= 0.9 and sum(correct[-5:]) / 5 >= 0.85, correct
