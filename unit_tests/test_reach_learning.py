"""A tiny model learns by the recipes to reach the dot: pictures in, action tokens out, several turns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import main_rl
import main_sl
from data_prep import reach, tiny_vision_model
from driver.run_result import RunResult
from rollouts.envs.reach import BINS

ROOT = Path(__file__).parent.parent
GAMES = 12_000
BY_CHANCE = 0.3


def make_files(folder: Path, *, seed: int, train: int, held_out: int, games: int) -> None:
    """Make a model that can act, starts, and an expert's games."""
    tiny_vision_model.main(["--out", str(folder / "model"), "--action-tokens", str(BINS), "--seed", str(seed)])
    sizes = ["--train", str(train), "--eval", str(held_out), "--sft", str(games), "--by-chance", str(BY_CHANCE)]
    reach.main(["--out", str(folder), *sizes, "--seed", str(seed)])


def learn(folder: Path, seed: int, warming: tuple[str, ...] = (), then: tuple[str, ...] = ()) -> list[RunResult]:
    """Run both recipes; warming, then: settings of either."""
    given = [f"run_dir={folder / 'runs'}", f"seed={seed}"]
    own = [f"model.path={folder / 'model'}", f"data.train={folder / 'sft.parquet'}", f"save_to={folder / 'warm'}"]
    warm = main_sl.run(str(ROOT / "configs/reach_sft.yaml"), [*given, *own, *warming])
    own = [f"model.path={folder / 'warm'}", f"data.train={folder / 'train.parquet'}"]
    return [
        warm,
        main_rl.run(str(ROOT / "configs/reach.yaml"), [*given, *own, f"data.eval={folder}/eval.parquet", *then]),
    ]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_both_recipes_run_some_steps(tmp_path, one_thread):
    make_files(tmp_path, seed=0, train=40, held_out=20, games=200)
    short = ("steps=30", "rows_per_step=16", "trainer.warmup_updates=5")
    few = ("steps=2", "groups_per_step=6", "group_size=8", "updates_per_step=1", "data.eval_rows=20")
    warm, done = learn(tmp_path, 0, short, few)
    losses = [step["train/loss"] for step in read_lines(warm.folder / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]
    for step in read_lines(done.folder / "metrics.jsonl"):
        assert step["train/mismatch/abs_logp"] < 1e-5, "of pictures in several turns, within the allowed tokens"
        assert step["rollout/turns_mean"] > 1 and step["rollout/failed"] == 0
    assert {"reward/reached", "reward/no_action"} <= done.before.keys()
    samples = [s for file in sorted((done.folder / "samples").iterdir()) for s in read_lines(file)]
    assert len(samples) == 2 * 6 * 8
    for sample in samples:
        assert sample["prompt"][0]["parts"][0]["type"] == "image"
        told, said = ([t for t in sample["turns"] if t["role"] == role] for role in ("user", "assistant"))
        assert all(re.fullmatch(r"(<act_\d+>)*", turn["content"]) for turn in said), "nothing but actions"
        assert all([part["type"] for part in turn["parts"]] == ["image"] for turn in told)
        assert len(told) == sample["counts"]["turns"] - 1


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_arm_reaches_its_dot_after_reinforcement_learning_and_seldom_before(seed, tmp_path):
    make_files(tmp_path, seed=seed, train=4000, held_out=400, games=GAMES)
    _, done = learn(tmp_path, seed)
    before, after = done.before["reward/reached"], done.after["reward/reached"]
    assert 0.1 < before <= 0.5 and after >= 0.9, (before, after)
