"""A tiny model learns by the recipes to reach the dot: images in, action tokens out, several turns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import main_rl
import main_sl
from data_prep import reach, tiny_vision_model
from driver.records.run_result import RunResult
from rollouts.envs.reach import BINS
from unit_tests.helpers.runs import metrics_of

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent
GAMES = 12_000
BY_CHANCE = 0.55


def make_files(folder: Path, *, seed: int, train: int, held_out: int, games: int) -> None:
    """Make a model that can act, starts, and an expert's games."""
    tiny_vision_model.main(["--out", str(folder / "model"), "--action-tokens", str(BINS), "--seed", str(seed)])
    sizes = ["--train", str(train), "--eval", str(held_out), "--sft", str(games), "--by-chance", str(BY_CHANCE)]
    reach.main(["--out", str(folder), *sizes, "--seed", str(seed)])


def warm_up(folder: Path, *given: str) -> RunResult:
    """Run the supervised recipe."""
    own = [f"model.path={folder / 'model'}", f"data.train={folder / 'sft.parquet'}", f"save_to={folder / 'warm'}"]
    return main_sl.run(str(ROOT / "configs/reach_sft.yaml"), [f"run_dir={folder / 'runs'}", *own, *given])


def reinforce(folder: Path, *given: str) -> RunResult:
    """Run the recipe of reinforcement learning on what the other one saved."""
    own = [f"model.path={folder / 'warm'}"] + [f"data.{which}={folder}/{which}.parquet" for which in ("train", "eval")]
    return main_rl.run(str(ROOT / "configs/reach.yaml"), [f"run_dir={folder / 'runs'}", *own, *given])


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_both_recipes_run_some_steps_and_resume(tmp_path, one_thread):
    """Each group is trained on twice, so that a checkpoint holds images which the environment has shown."""
    make_files(tmp_path, seed=0, train=40, held_out=20, games=200)
    warm = warm_up(tmp_path, "steps=30", "rows_per_step=16", "trainer.warmup_updates=5")
    losses = [step["train/loss"] for step in metrics_of(warm.folder)]
    assert losses[-1] < 0.8 * losses[0]
    few = ["groups_per_step=6", "group_size=8", "updates_per_step=1", "trainer.warmup_updates=1", "data.eval_rows=8"]
    few += ["sample_reuse=2", "max_staleness=1", "checkpoint.every=1", "trainer.lr_schedule=constant"]
    done = reinforce(tmp_path, *few, "steps=2")
    assert {"reward/reached", "reward/no_action"} <= done.before.keys()
    first, _ = metrics_of(done.folder)
    assert first["train/mismatch/abs_logp"] < 1e-5, "of images in several turns, within the allowed tokens"
    assert first["rollout/turns_mean"] > 1 and first["rollout/failed"] == 0
    samples = [s for file in sorted((done.folder / "samples").iterdir()) for s in read_lines(file)]
    assert len(samples) >= 6 * 8
    for sample in samples:
        assert sample["prompt"][0]["parts"][0]["type"] == "image"
        turns = sample.get("turns", [{"role": "assistant", "content": sample["completion"]}])  # one reply is a text
        told, said = ([t for t in turns if t["role"] == role] for role in ("user", "assistant"))
        assert all(re.fullmatch(r"(<act_\d+>)*", turn["content"]) for turn in said), "nothing but actions"
        assert all([part["type"] for part in turn["parts"]] == ["image"] for turn in told)
        assert len(told) == sample["counts"]["turns"] - 1
    state = json.loads((done.folder / "checkpoints/last/progress.json").read_text())
    assert state["position"]["images"]
    resumed = reinforce(tmp_path, *few, "steps=3", f"resume={done.folder}")
    [third] = metrics_of(resumed.folder)
    assert third["step"] == 2 and third["train/mismatch/abs_logp"] < 1, "the groups of the second step are seen again"


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_arm_seldom_reaches_its_dot_until_reinforcement_learning(seed, tmp_path):
    make_files(tmp_path, seed=seed, train=4000, held_out=400, games=GAMES)
    warm_up(tmp_path, f"seed={seed}")
    done = reinforce(tmp_path, f"seed={seed}")
    before, after = done.before["reward/reached"], done.after["reward/reached"]
    assert 0.1 < before <= 0.5 and after >= 0.9, (before, after)
