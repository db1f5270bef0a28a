"""A tiny model learns a visual task by the recipes, and what it knows it has from the pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import main_rl
import main_sl
from data_prep import tiny_vision_model, visual
from unit_tests.examples import run_here

ROOT = Path(__file__).parent.parent
SIZES = ["--train", "2000", "--eval", "500", "--sft", "16000", "--wrong-share", "0.72"]
CHANCE = 1 / 16


def run(program, recipe: str, folder: Path, *given: str) -> dict:
    """The summary of a run."""
    code, err = run_here(program, "--config", str(ROOT / "configs" / recipe), f"run_dir={folder}", *given)
    assert code == 0, err
    [made] = folder.iterdir()
    return json.loads((made / "summary.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The model, and its data with and without the right pictures."""
    folder = tmp_path_factory.mktemp("vision")
    tiny_vision_model.main(["--out", str(folder / "model"), "--vision-layers", "1"])
    for pictures in ("own", "shuffled"):
        visual.main(["--out", str(folder / pictures), *SIZES, "--pictures", pictures])
    return folder


def learn(made: Path, pictures: str, folder: Path) -> tuple[float, float]:
    """The held-out reward after the warm-up, and after reinforcement learning."""
    data, warm = made / pictures, made / f"warm_{pictures}"
    given = [f"model.path={made / 'model'}", f"data.train={data}/sft.parquet", f"save_to={warm}", "backend=local"]
    run(main_sl, "vision_quickstart_sft.yaml", folder / "sft", *given)
    given = [f"model.path={warm}", f"data.train={data}/train.parquet", f"data.eval={data}/eval.parquet"]
    summary = run(main_rl, "vision_quickstart.yaml", folder / "rl", *given)
    return summary["before"]["reward/mean"], summary["after"]["reward/mean"]


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_a_tiny_model_learns_to_see(made, tmp_path):
    before, after = learn(made, "own", tmp_path)
    assert 3 * CHANCE < before <= 0.4 and after >= 0.9, (before, after)


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_with_the_pictures_of_other_rows_it_stays_at_chance(made, tmp_path):
    before, after = learn(made, "shuffled", tmp_path)
    assert before <= 2 * CHANCE and after <= 2.5 * CHANCE, (before, after)


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_sft_on_pictures_has_a_lower_held_out_loss_than_on_text_alone(made, tmp_path):
    losses = {}
    for pictures in ("own", "none"):
        data = tmp_path / pictures
        sizes = ["--train", "0", "--eval", "0", "--pictures", pictures]
        visual.main(["--out", str(data / "train"), *sizes, "--sft", "10000"])
        visual.main(["--out", str(data / "eval"), *sizes, "--sft", "400", "--seed", "1"])
        given = [f"model.path={made / 'model'}", f"save_to={tmp_path / 'saved'}", "backend=local"]
        given += [f"data.train={data}/train/sft.parquet", f"data.eval={data}/eval/sft.parquet"]
        summary = run(main_sl, "vision_quickstart_sft.yaml", tmp_path / f"runs_{pictures}", *given)
        losses[pictures] = summary["after"]["eval/loss"]
    assert losses["own"] < 0.5 * losses["none"], losses


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_dpo_tells_right_from_wrong_replies_by_the_picture(made, tmp_path):
    """Over text alone, as often as not a reply is right that another row's picture makes wrong."""
    accuracy = {}
    for pictures in ("own", "shuffled"):
        data = tmp_path / pictures
        sizes = ["--train", "0", "--eval", "0", "--pictures", pictures]
        visual.main(["--out", str(data / "train"), *sizes, "--pairs", "10000"])
        visual.main(["--out", str(data / "eval"), *sizes, "--pairs", "400", "--seed", "1"])
        given = [f"model.path={made / 'model'}", f"save_to={tmp_path / 'saved'}", "backend=local"]
        given += ["alg={name: dpo, beta: 0.5}", f"data.train={data}/train/pairs.parquet"]
        given += [f"data.eval={data}/eval/pairs.parquet"]
        summary = run(main_sl, "vision_quickstart_sft.yaml", tmp_path / f"runs_{pictures}", *given)
        accuracy[pictures] = summary["after"]["eval/pair/accuracy"]
    assert accuracy["own"] > 0.95 and 0.4 < accuracy["shuffled"] < 0.6, accuracy
