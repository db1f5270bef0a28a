"""Recipes: bases, keys of earlier versions, epochs; and what a checkpoint of an earlier version says."""

import json
from pathlib import Path

import pytest
import yaml

import main_rl
import main_sl
from algs import RENAMED_METHODS
from configs.load import merge_recipes, read_recipe
from configs.renamed import ADDED, RENAMED, RENAMED_IN_SUPERVISED, translate_settings
from configs.schema import RLConfig, SLConfig
from core.errors import UserError
from core.types.samples import Prompt
from driver.load_recipe import load_recipe
from driver.resume import changed_files, changed_package_files, flatten_settings
from rollouts.scheduling.buffer import ReplayBuffer, Schedule
from unit_tests.driver.test_checkpoint import folder_of
from unit_tests.driver.test_runs import metrics_of
from unit_tests.helpers.examples import run_here


def drawn_prompt(ticket: int) -> Prompt:
    return Prompt(id=str(ticket), messages=[])


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
    assert base == {"alg": {"name": "grpo", "clip_low": 0.1}}, "the base stays as it is"


@pytest.mark.parametrize(
    ("base", "says"),
    [("a.yaml", "leads back to itself"), ("nowhere.yaml", "no such file"), (3, "must be the path of another recipe")],
)
def test_a_base_that_cannot_be_is_refused(tmp_path, base, says):
    with pytest.raises(UserError, match=says):
        read_recipe(write(tmp_path / "a.yaml", {"base": base}))


OLD_RL = {
    "max_lag": (1, "max_staleness: 1"),
    "publish_every": (2, "weight_sync.every: 2"),
    "publish_drift": (0.1, "weight_sync.max_kl: 0.1"),
    "reuse": (2, "sample_reuse: 2"),
    "rollout.update": ("drain", "weight_sync.pause_mode: wait"),
    "rollout.tensor_parallel": (2, "rollout.tensor_parallel_size: 2"),
    "reward.max_failed_share": (0.2, "reward.max_failed_fraction: 0.2"),
    "data.max_unfit_share": (0.2, "data.max_invalid_fraction: 0.2"),
    "alg.scale": ("group", "alg.scale_rewards: group"),
    "alg.drop_dead_groups": (True, "alg.dynamic_sampling: true"),
    "alg.overlong.longest": (8, "alg.overlong.max_tokens: 8"),
}
OLD_SL = {
    "data.max_prompt_tokens": (32, "data.max_tokens: 32"),
    "data.learn": (["user"], r"data.train_on: \['user'\]"),
    "reference": ("ahead", "precompute_ref_logp: true"),
}


@pytest.mark.parametrize("kind", ["rl", "sl"])
def test_a_key_of_an_earlier_version_is_refused_with_its_new_name(recipe, kind):
    for key, (value, new) in {"rl": OLD_RL, "sl": OLD_SL}[kind].items():
        with pytest.raises(UserError, match=f"^{key} was renamed: write {new}$"):
            load_recipe(RLConfig if kind == "rl" else SLConfig, recipe({key: value}, kind=kind), [])


OWN_SCALE = """
from algs.grpo import GRPO
class Mine(GRPO):
    scale: float = 1.0
    def loss(self, policy, tokens):
        loss, metrics = super().loss(policy, tokens)
        return self.scale * loss, metrics
"""


def test_an_algorithm_of_the_users_may_have_a_key_that_ours_once_had(recipe, tmp_path):
    """It is loaded, and its checkpoint's settings are compared under that name."""
    (tmp_path / "mine.py").write_text(OWN_SCALE)
    mine = {"alg": {"file": str(tmp_path / "mine.py"), "scale": 2.0}}
    loaded = load_recipe(RLConfig, recipe(mine), [])
    assert loaded.cfg.alg["scale"] == 2.0
    now = flatten_settings(loaded.cfg.model_dump(mode="json"))
    assert translate_settings(now, supervised=False, known=now.keys()) == now
    with pytest.raises(UserError, match=r"alg\.drop_dead_groups was renamed"):
        load_recipe(RLConfig, recipe({**mine, "alg.drop_dead_groups": True}), [])


def test_every_renamed_key_is_tried():
    assert OLD_RL.keys() | OLD_SL.keys() == RENAMED.keys() | RENAMED_IN_SUPERVISED.keys()


def test_a_method_of_an_earlier_version_is_refused_with_its_new_name(recipe, tmp_path):
    for old, new in RENAMED_METHODS.items():
        file = tmp_path / f"old_{old}.py"
        file.write_text(
            "from algs.grpo import GRPO\nclass Mine(GRPO):\n"
            f"    def {old}(self, *args): ...\n    def loss(self, policy, tokens): ...\n"
        )
        code, err = run_here(main_rl, "--config", recipe({"alg": {"file": str(file)}}))
        assert code == 2 and f"defines {old}, which was renamed to {new}" in err, err


def test_settings_of_an_earlier_checkpoint_mean_what_they_meant(recipe):
    now = flatten_settings(load_recipe(RLConfig, recipe(), []).cfg.model_dump(mode="json"))
    new_to_old = {new: old for old, new in RENAMED.items()}
    then = {new_to_old.get(key, key): value for key, value in now.items() if key not in ADDED}
    then["rollout.update"] = "in_flight"
    then["data.learn"] = ["assistant"]
    assert translate_settings(then, supervised=False) == now
    assert translate_settings(now, supervised=False) == now


def test_a_changed_file_of_the_user_is_refused_and_one_of_ours_is_told():
    then = {"sha256": {"alg": "a", "reward.function": "b", "data.train": "c"}, "in_package": []}
    now = {"sha256": {"alg": "A", "reward.function": "B", "data.train": "c", "rollout.env": "new"}}
    now["in_package"] = ["alg", "rollout.env"]
    assert changed_files(then, now) == ["alg", "reward.function"], "an earlier version did not note the environment"
    assert changed_package_files(then, now) == ["alg"]


def test_a_buffer_of_an_earlier_checkpoint_is_read():
    sample = {"token_ids": [1, 2], "mask": [False, True], "rollout_logp": [0.0, -1.0], "versions": [-1, 0]}
    sample |= {"parts": {"correct": 1.0}, "reward": 1.0, "left_out": None, "stop": "eos", "failure": ""}
    came = [{"ticket": 0, "group": [sample], "kept": True, "seconds": 1.0}]
    state = {"ticket": 2, "started": [1], "told": 0, "came": came}
    buffer = ReplayBuffer.from_state(state, Schedule(steps=2, per_step=2), drawn_prompt, step=0)
    assert json.loads(json.dumps(buffer.get_state()))["started"] == [1]
    [finished] = buffer.waiting.values()
    assert finished.accepted and finished.group[0].action_mask.tolist() == [False, True]
    assert finished.group[0].reward_parts == {"correct": 1.0}


@pytest.mark.parametrize(("epochs", "steps"), [(2, 6), (0.5, 2), (1.1, 4)])
def test_epochs_are_steps_over_the_rows_that_are_valid(recipe, tmp_path, epochs, steps, one_thread):
    """15 rows, 5 in a step."""
    path = recipe({"steps": None, "epochs": epochs}, kind="sl")
    assert run_here(main_sl, "--config", path, "name=epochs") == (0, "")
    folder = folder_of(tmp_path, "epochs")
    assert len(metrics_of(folder)) == steps
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["steps"], saved["epochs"]) == (steps, None)


@pytest.mark.parametrize("changes", [{"epochs": 1}, {"steps": None}])
def test_steps_and_epochs_exclude_each_other(recipe, changes):
    with pytest.raises(UserError, match="set either steps or epochs"):
        load_recipe(SLConfig, recipe(changes, kind="sl"), [])


def test_eps_reaches_the_optimizer(recipe, tmp_path, one_thread):
    """A large eps makes every step tiny, so the loss stays where it was."""
    losses = {}
    for eps in (1e-8, 1e8):
        assert run_here(main_sl, "--config", recipe({"trainer.eps": eps}, kind="sl"), f"name=eps{eps:g}") == (0, "")
        losses[eps] = [row["train/loss"] for row in metrics_of(folder_of(tmp_path, f"eps{eps:g}"))]
    assert losses[1e-8][0] == losses[1e8][0] and losses[1e-8][1] != losses[1e8][1]
