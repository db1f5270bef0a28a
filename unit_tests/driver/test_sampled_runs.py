"""Runs whose prompts a sampler chooses: what they log, and the rows of a run that was stopped."""

import json

import pytest

import main_rl
from configs.schema import RLConfig
from core.errors import UserError
from core.loading import FileSpec
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_prompts
from driver.load_recipe import load_recipe
from driver.resume import check_settings
from driver.rl.row_order import check_sampler
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import LUCK, file_of, folder_of, metrics_of
from unit_tests.helpers.sentences import tell

pytestmark = pytest.mark.one_core

TARGET = """
import numpy as np
from data_feeds.samplers.base import Sampler, take_best


class Target(Sampler):
    target: float = 0.5

    def choose(self, pool, history, *, count, rng):
        rate = history.passed[pool] / np.maximum(1, history.samples[pool])
        return take_best(pool, -abs(rate - self.target) - 0.01 * history.drawn[pool], count)
"""


@pytest.mark.slow
def test_a_resumed_run_draws_the_rows_of_one_that_never_stopped(recipe, tmp_path, one_thread, capsys):
    sampler = {"file": file_of(tmp_path / "target.py", TARGET), "target": 0.4}
    luck = {"reward.function": file_of(tmp_path / "luck.py", LUCK)}
    keys = {
        "data.sampler": sampler,
        "steps": 4,
        "groups_per_step": 2,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
        "rollout.max_new_tokens": 2,
    }
    path = recipe(keys | luck)
    assert run_here(main_rl, "--config", path, "name=whole") == (0, "")
    assert "target.py: rows are drawn with unequal probabilities" in capsys.readouterr().out
    whole = folder_of(tmp_path, "whole")
    from_2 = f"resume={whole / 'checkpoints/step_00002'}"
    assert run_here(main_rl, "--config", path, "name=resumed", from_2) == (0, "")
    numbers = [
        [{k: v for k, v in line.items() if k.startswith("data/")} for line in metrics_of(folder)]
        for folder in (whole, folder_of(tmp_path, "resumed"))
    ]
    assert numbers[0][2:] == numbers[1] and {*numbers[0][3]} == {
        *("data/drawn_pass_rate", "data/given_pass_rate", "data/new_rows", "data/effective_rows")
    }
    states = [
        json.loads((folder / "checkpoints/step_00004/progress.json").read_text())["position"]["sampled"]
        for folder in (whole, folder_of(tmp_path, "resumed"))
    ]
    assert states[0] == states[1] and sum(states[0]["histories"][0]["columns"]["drawn"]) == 8
    # the settings of a sampler, and its file, are part of the training
    code, err = run_here(main_rl, "--config", path, from_2, "data.sampler.target=0.5")
    assert code == 2 and "data.sampler.target is 0.5 and was 0.4 when the checkpoint was made" in err
    (tmp_path / "target.py").write_text(TARGET.replace("0.01", "0.02"))
    code, err = run_here(main_rl, "--config", path, from_2)
    assert code == 2 and "the file of data.sampler changed since the checkpoint was made" in err


def test_a_checkpoint_from_before_forms_had_names_is_resumed():
    """The rows had our columns, whichever `columns` named them; only the form of other rows is a change."""
    then = {"trainer.lr_schedule": "constant", "data.train": [{"path": "a.jsonl", "ratio": 1.0}]}  # form: since 0.2.0

    def now(form: str) -> dict:
        return then | {
            "data.train": [{"path": "a.jsonl", "ratio": 1.0, "form": form, "lazy": False}],
            "data.sampler": None,
        }

    check_settings(then, now("ours"))
    check_settings(then | {"data.train": "a.jsonl"}, then | {"data.train": "a.jsonl", "data.curriculum": None})
    check_settings(now("verl"), now("verl"))
    for earlier in (then, now("ours")):
        with pytest.raises(
            UserError, match=r"data.train is .*'form': 'alpaca'.* and was .* when the checkpoint was made"
        ):
            check_settings(earlier, now("alpaca"))


ONCE = """
from data_feeds.samplers.base import Sampler


class Once(Sampler):
    most: int = 1

    def choose(self, pool, history, *, count, rng):
        if history.drawn.sum() >= self.most:
            raise ValueError("no row is left")
        return pool[:count]
"""


def test_a_sampler_is_tried_on_the_first_rows_before_the_start(recipe, tmp_path, tiny_path):
    """And on no others: a sampler that fails later stops the run where it fails."""
    once = file_of(tmp_path / "once.py", ONCE)

    def check(most: int) -> FileSpec | None:
        changes = {"data.sampler": {"file": once, "most": most}, "groups_per_step": 1}
        cfg = load_recipe(RLConfig, recipe(changes), []).cfg
        return check_sampler(cfg, load_prompts(cfg.data, "train", ChatTokenizer(tiny_path, "chat"), seed=0))

    found = check(most=1)
    assert found is not None and found.path == once
    assert tell(lambda: check(most=0)) == f"data.sampler={once}: choose() raised ValueError: no row is left"
