"""Recipes: bases, epochs, and files that a checkpoint names."""

from pathlib import Path

import pytest
import yaml

import main_sl
from configs.load import merge_recipes, read_recipe
from configs.schema import RLConfig, SLConfig
from core.errors import UserError
from driver.load_recipe import load_recipe
from driver.resume import changed_files, changed_package_files
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import folder_of, metrics_of


def write(path, recipe: dict) -> str:
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def test_a_recipe_states_only_what_differs_from_its_base(tmp_path, recipe):
    base = yaml.safe_load(Path(recipe()).read_text())
    write(tmp_path / "base.yaml", base)
    write(tmp_path / "middle.yaml", {"base": "base.yaml", "trainer": {"ranks": 1}, "steps": 5})
    (tmp_path / "below").mkdir()
    top = write(tmp_path / "below" / "top.yaml", {"base": "../middle.yaml", "alg": {"name": "rloo"}})
    cfg = load_recipe(RLConfig, top, ["steps=6"]).cfg
    assert (cfg.steps, cfg.alg["name"], cfg.trainer.lr) == (6, "rloo", base["trainer"]["lr"])


def test_another_algorithm_does_not_inherit_settings_of_the_one_before():
    base = {"alg": {"name": "grpo", "clip_low": 0.1}}
    assert merge_recipes(base, {"alg": {"clip_high": 0.3}})["alg"] == base["alg"] | {"clip_high": 0.3}
    assert merge_recipes(base, {"alg": {"name": "ppo"}})["alg"] == {"name": "ppo"}
    assert merge_recipes(base, {"alg": {"file": "own.py"}})["alg"] == {"file": "own.py"}
    again = merge_recipes(base, {"alg": {"name": "grpo", "clip_high": 0.3}})["alg"]
    assert again == base["alg"] | {"clip_high": 0.3}, "the same algorithm keeps them"
    assert base == {"alg": {"name": "grpo", "clip_low": 0.1}}, "the base stays as it is"


@pytest.mark.parametrize(
    ("base", "says"),
    [("a.yaml", "leads back to itself"), ("nowhere.yaml", "no such file"), (3, "must be the path of another recipe")],
)
def test_a_base_that_cannot_be_is_refused(tmp_path, base, says):
    with pytest.raises(UserError, match=says):
        read_recipe(write(tmp_path / "a.yaml", {"base": base}))


def test_a_changed_file_of_the_user_is_refused_and_one_of_ours_is_told():
    then = {"sha256": {"alg": "a", "reward.function": "b", "data.train": "c"}, "in_package": []}
    now = {"sha256": {"alg": "A", "reward.function": "B", "data.train": "c", "rollout.env": "new"}}
    now["in_package"] = ["alg", "rollout.env"]
    assert changed_files(then, now) == ["alg", "reward.function"], "one of ours may be new"
    assert changed_package_files(then, now) == ["alg"]


@pytest.mark.parametrize(("epochs", "steps"), [(2, 6), (0.5, 2), (1.1, 4)])
def test_epochs_are_steps_over_the_rows_that_are_valid(recipe, tmp_path, epochs, steps, one_thread):
    """15 rows, 5 in a step."""
    path = recipe({"steps": None, "epochs": epochs}, kind="sl")
    assert run_here(main_sl, "--config", path, "name=epochs") == (0, "")
    folder = folder_of(tmp_path, "epochs")
    assert len(metrics_of(folder)) == steps
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["steps"], saved["epochs"]) == (steps, None)


def test_a_copy_of_settings_has_no_unknown_field(recipe):
    cfg = load_recipe(SLConfig, recipe(kind="sl"), []).cfg
    with pytest.raises(TypeError, match="TrainerConfig has no field lrr"):
        cfg.trainer.model_copy(update={"lrr": 1.0})
    assert cfg.trainer.model_copy(update={"lr": 0.5}).lr == 0.5


@pytest.mark.parametrize(("epochs", "rows", "steps"), [(2.2, 100, 44), (2.2, 101, 45), (1e-9, 5, 1)])
def test_epochs_are_not_rounded_before_their_steps(recipe, epochs, rows, steps):
    """In floats 2.2 x 100 / 5 is more than 44."""
    cfg = load_recipe(SLConfig, recipe({"steps": None, "epochs": epochs}, kind="sl"), []).cfg
    assert cfg.with_steps(rows).steps == steps


@pytest.mark.parametrize("changes", [{"epochs": 1}, {"steps": None}])
def test_steps_and_epochs_exclude_each_other(recipe, changes):
    with pytest.raises(UserError, match="set either steps or epochs"):
        load_recipe(SLConfig, recipe(changes, kind="sl"), [])
