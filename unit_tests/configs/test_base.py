"""`base: other.yaml`: errors name the file that is looked for, and the file that sets an inherited key."""

from pathlib import Path

import pytest

import main_rl
from configs.schema import RLConfig
from core.errors import UserError
from driver.load_recipe import load_recipe
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import file_of


def test_a_missing_base_is_named_with_where_it_was_looked_for(recipe, tmp_path):
    recipe()
    own = file_of(tmp_path / "own.yaml", "base: rll.yaml\n")
    code, err = run_here(main_rl, "--config", own)
    assert code == 2 and err == (
        f"error: {own}: base=rll.yaml, looked for at {tmp_path / 'rll.yaml'}: there is no such file "
        "(did you mean 'rl.yaml'?)\n"
    )
    with pytest.raises(UserError, match=r"the given keys: base=nowhere\.yaml, looked for at /"):
        load_recipe(RLConfig, {"base": "nowhere.yaml"}, [])
    file_of(tmp_path / "rll.yaml", "- a list")
    assert "rll.yaml must hold keys and values" in run_here(main_rl, "--config", own)[1]


def test_an_error_says_which_keys_come_from_the_base(recipe, tmp_path):
    base = recipe({"reward.weights": {"correct": 0.5}})
    digits = file_of(tmp_path / "digits.py", "def score(prompt, messages):\n    return {'digits': 0.0}\n")
    own = file_of(tmp_path / "own.yaml", f"base: rl.yaml\nreward: {{function: {digits}, weights: {{digits: 1.0}}}}\n")
    code, err = run_here(main_rl, "--config", own)
    inherited = f"(the recipe inherits reward.weights.correct from its base {base})"
    assert code == 2 and "reward.weights names 'correct', but the reward returns only digits" in err
    assert inherited in err and "reward.weights.digits" not in err
    assert run_here(main_rl, "--config", own, "reward.weights={digits: 1.0}", "steps=1") == (0, "")


def test_errors_about_own_keys_name_no_base(recipe, tmp_path):
    recipe()
    own = file_of(tmp_path / "own.yaml", "base: rl.yaml\nupdates_per_step: 3\n")
    with pytest.raises(UserError, match=r"inherits groups_per_step from its base .*rl.yaml\)"):
        load_recipe(RLConfig, own, [])
    with pytest.raises(UserError) as error:
        load_recipe(RLConfig, own, ["groups_per_step=4"])
    assert "inherits" not in str(error.value)


def test_a_run_knows_which_keys_come_from_which_base(recipe, tmp_path):
    base = Path(recipe())
    own = file_of(tmp_path / "own.yaml", "base: rl.yaml\nsteps: 3\nreward: {workers: 2}\n")
    inherited = load_recipe(RLConfig, own, ["seed=4", "rollout={engine: hf}"]).inherited
    assert {key: inherited.get(key) for key in ("name", "reward.function", "steps", "reward.workers", "seed")} == {
        **dict.fromkeys(("name", "reward.function"), base),
        **dict.fromkeys(("steps", "reward.workers", "seed")),
    }
    assert not [key for key in inherited if key.startswith("rollout")], "the override sets the whole section"
