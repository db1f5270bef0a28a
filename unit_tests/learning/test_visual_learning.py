"""A tiny model learns a visual task by the recipes, and what it knows it has from the images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import main_rl
import main_sl
from data_prep import tiny_vision_model, visual
from driver.records.run_result import RunResult

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent
SIZES = ["--train", "2000", "--eval", "500", "--sft", "16000", "--wrong-share", "0.72"]
HELD_OUT = 400
"""Rows of a supervised held-out set."""
CHANCE = 1 / 16
"""Held-out reward of who answers without a look."""


def run(program, recipe: str, run_dir: Path, *given: str) -> RunResult:
    return program.run(str(ROOT / "configs" / recipe), [f"run_dir={run_dir}", *given])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def warm_up(folder) -> Callable[[str, int], tuple[Path, Path]]:
    """Data with or without the right images, and the model that the recipe makes of them."""
    made: dict[tuple[str, int], tuple[Path, Path]] = {}

    def find(images: str, seed: int) -> tuple[Path, Path]:
        if (images, seed) not in made:
            data, model = folder / f"{images}{seed}", folder / f"model{seed}"
            seeded = ["--seed", str(seed)]
            tiny_vision_model.main(["--out", str(model), "--vision-layers", "1", *seeded])
            visual.main(["--out", str(data), *SIZES, "--images", images, *seeded])
            given = [f"model.path={model}", f"data.train={data}/sft.parquet", f"seed={seed}", "save_to=null"]
            warm = run(main_sl, "vision_quickstart_sft.yaml", folder / "runs", *given)
            made[images, seed] = data, warm.model
        return made[images, seed]

    return find


def reinforce(data: Path, warm: Path, seed: int, *given: str) -> tuple[float, float]:
    """The held-out reward before and after reinforcement learning, of the policy as it samples."""
    given = (f"model.path={warm}", f"data.train={data}/train.parquet", f"data.eval={data}/eval.parquet", *given)
    done = run(main_rl, "vision_quickstart.yaml", data / "runs", f"seed={seed}", *given)
    return done.before["reward/mean"], done.after["reward/mean"]


@pytest.mark.verify
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tiny_model_learns_to_see(warm_up, seed, one_thread):
    before, after = reinforce(*warm_up("own", seed), seed)
    assert 2 * CHANCE < before <= 0.4 and after >= 0.9, (before, after)


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_with_the_images_of_other_rows_it_stays_at_chance(warm_up, one_thread):
    before, after = reinforce(*warm_up("shuffled", 0), 0)
    assert before <= 2 * CHANCE and after <= 2 * CHANCE, (before, after)


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_sft_on_images_has_a_lower_held_out_loss_than_on_text_alone(tmp_path, one_thread):
    tiny_vision_model.main(["--out", str(tmp_path / "model"), "--vision-layers", "1"])
    losses = {}
    for images in ("own", "none"):
        data = tmp_path / images
        sizes = ["--train", "0", "--eval", "0", "--images", images]
        visual.main(["--out", str(data / "train"), *sizes, "--sft", "8000"])
        visual.main(["--out", str(data / "eval"), *sizes, "--sft", str(HELD_OUT), "--seed", "1"])
        given = [f"model.path={tmp_path / 'model'}", "save_to=null", f"data.eval_rows={HELD_OUT}", "steps=240"]
        given += [f"data.train={data}/train/sft.parquet", f"data.eval={data}/eval/sft.parquet"]
        done = run(main_sl, "vision_quickstart_sft.yaml", tmp_path / "runs", *given)
        losses[images] = done.after["eval/loss"]
    assert losses["own"] < 0.5 * losses["none"], losses


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_dpo_tells_right_from_wrong_replies_by_the_image(warm_up, tmp_path, one_thread):
    """With the images of other rows a reply that is right here is wrong there as often, so nothing can be learned."""
    _, warm = warm_up("own", 0)
    accuracy = {}
    for images in ("own", "shuffled"):
        data = tmp_path / images
        sizes = ["--train", "0", "--eval", "0", "--images", images]
        visual.main(["--out", str(data / "train"), *sizes, "--pairs", "2000", "--seed", "2"])
        visual.main(["--out", str(data / "eval"), *sizes, "--pairs", str(HELD_OUT), "--seed", "3"])
        given = [f"model.path={warm}", "save_to=null", f"data.eval_rows={HELD_OUT}", "alg={name: dpo, beta: 0.5}"]
        given += ["steps=40", "rows_per_step=48", "trainer.lr=5e-4", "trainer.warmup_updates=5"]
        given += [f"data.train={data}/train/pairs.parquet", f"data.eval={data}/eval/pairs.parquet"]
        done = run(main_sl, "vision_quickstart_sft.yaml", tmp_path / "runs", *given)
        accuracy[images] = done.after["eval/pair/accuracy"]
    assert accuracy["own"] > 0.95 and 0.4 < accuracy["shuffled"] < 0.6, accuracy


@pytest.mark.slow
def test_both_recipes_run(tmp_path, one_thread):
    """A few steps of each, at the recipes' settings: the warm-up learns what an answer looks like."""
    model, data = tmp_path / "model", tmp_path / "data"
    tiny_vision_model.main(["--out", str(model), "--vision-layers", "1"])
    visual.main(["--out", str(data), "--train", "60", "--eval", "100", "--sft", "1200"])
    given = [f"model.path={model}", f"data.train={data}/sft.parquet", "save_to=null", "steps=90"]
    warm = run(main_sl, "vision_quickstart_sft.yaml", tmp_path / "runs", *given)
    assert warm.metrics["train/loss"] < 1.5  # from log(107) = 4.7
    before, after = reinforce(
        data, warm.model, 0, "steps=2", "groups_per_step=8", "updates_per_step=2", "trainer.warmup_updates=1"
    )
    assert 0 < before < 1 and 0 < after < 1
