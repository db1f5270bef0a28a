"""A key that was set and does nothing is refused by a rule."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import RLConfig, SLConfig
from configs.tracking_schema import TrackingConfig
from core.errors import UserError
from driver.checks.unused_keys import RULES, TERM_RULES, is_given
from driver.load_recipe import load_recipe

UNUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    # key: (a value, the settings with which it is of use); without them it is refused
    "max_resumes": (2, {"on_failure": "resume", "checkpoint.every": 1}),
    "ship_code": (True, {"ray_address": "10.0.0.1:6379"}),
    "checkpoint.keep": (3, {"checkpoint.every": 1}),
    "data.eval_rows": (5, {"data.eval": "x.parquet"}),
    "rollout.max_turns": (2, {"rollout.env": "calculator"}),
    "alg.credit": ("turn", {"rollout.env": "calculator", "rollout.max_turns": 2}),
    "rollout.sleep_mode": ("discard", {"placement": "colocate"}),
    "rollout.restarts": (1, {}),
    "trainer.betas": ([0.9, 0.95], {}),
    "trainer.eps": (1e-6, {}),
    "trainer.weight_decay": (0.1, {}),
    "trainer.optimizer_settings": ({"momentum_decay": 0.1}, {"trainer.optimizer": "torch.optim.NAdam"}),
    "trainer.share_prefixes": ("auto", {}),
    "data.max_image_pixels": (10_000, {"model.path": "models/made_later"}),
    "model.images": ("off", {"model.path": "models/made_later"}),
    "model.lora.vision": (True, {"model.path": "models/made_later"}),
    "weight_sync.whole_every": (3, {"weight_sync.delta": True}),
    "trainer.zero_stage": (2, {}),
    "trainer.deepspeed": ({"wall_clock_breakdown": True}, {}),
    "trainer.offload": (True, {"trainer.strategy": "fsdp2"}),
    "capture.weights": (True, {"capture.every": 1}),
    "capture.most": (2, {"capture.on": ["non_finite"]}),
    "capture.kl_above": (0.2, {"capture.on": ["kl"]}),
    "capture.grad_norm_times": (3.0, {"capture.on": ["kl", "grad_norm"]}),
    "profile.trace": (True, {"profile.steps": [0]}),
    "profile.memory": (True, {"profile.steps": [0]}),
    "eval_samples": (2, {"data.eval": "x.parquet"}),
    "eval_pass_reward": (0.5, {"data.eval": "x.parquet", "eval_samples": 2}),
}
TERMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "alg.kl.place": ("reward", {"alg.kl.coef": 0.1}),
    "alg.kl.estimator": ("k2", {"alg.kl.coef": 0.1}),
    "alg.kl.horizon": (100, {"alg.kl.coef": 0.1, "alg.kl.target": 0.1}),
    "alg.schedules.kl.coef": ({"start": 0.1, "end": 0.2, "steps": 3}, {}),
    "alg.adaptive_entropy.delta": (1e-3, {"alg.adaptive_entropy.target": 0.2}),
    "alg.adaptive_entropy.high": (1e-2, {"alg.adaptive_entropy.target": 0.2}),
    "alg.entropy_coef": (0.1, {}),
    "alg.schedules.entropy_coef": ({"start": 0.1, "end": 0.2, "steps": 3}, {}),
    "alg.overlong.max_tokens": (8, {"alg.overlong.mode": "penalty", "alg.overlong.buffer": 4}),
    "alg.overlong.buffer": (4, {"alg.overlong.mode": "penalty"}),
    "alg.overlong.coef": (0.5, {"alg.overlong.mode": "penalty", "alg.overlong.buffer": 4}),
    "alg.correction.mode": ("mask", {}),
    "alg.correction.high": (3.0, {}),
    "alg.correction.drift_from": ("rollout", {"alg.correction.max_drift": 0.1}),
    "alg.correction.low": (0.1, {"alg.correction.mode": "clip"}),
    "alg.correction.token_high": (3.0, {"alg.correction.level": "geometric", "alg.correction.mode": "mask"}),
}
DEAD = {
    **{f"alg.correction.{key}": {"alg.correction.level": "none"} for key in ("mode", "high")},
    **{key: {"trainer.optimizer": "sgd"} for key in ("trainer.betas", "trainer.eps")},
    "trainer.weight_decay": {"trainer.optimizer": "torch.optim.NAdam"},
    **{key: {"trainer.strategy": "fsdp2"} for key in ("trainer.zero_stage", "trainer.deepspeed")},
    **{key: {"alg.adaptive_entropy.target": 0.2} for key in ("alg.entropy_coef", "alg.schedules.entropy_coef")},
    "alg.schedules.kl.coef": {"alg.kl.coef": 0.1, "alg.kl.target": 0.1},
    "trainer.share_prefixes": {"trainer.layout": "padded"},
    "trainer.optimizer_settings": {"trainer.optimizer": "adamw"},
    "rollout.restarts": {"placement": "colocate"},
    "capture.most": {"capture.every": 1},
    "capture.kl_above": {"capture.on": ["grad_norm"]},
    "capture.grad_norm_times": {"capture.on": ["kl"]},
}
"""Settings with which a key is of no use, where that is not so by default."""


def test_every_rule_has_an_example():
    assert sorted(UNUSED) == sorted(key for rule in RULES for key in rule.keys)
    assert sorted(TERMS) == sorted(key for rule in TERM_RULES for key in rule.keys)


@pytest.mark.parametrize("key", [*UNUSED, *TERMS])
def test_a_key_of_no_use_is_refused_and_loads_where_it_is_of_use(key, recipe):
    value, useful = (UNUSED | TERMS)[key]
    with pytest.raises(UserError, match=f"^{key} is set and would not be read, because .*: leave it out$"):
        load_recipe(RLConfig, recipe(DEAD.get(key, {}) | {key: value}), [])
    load_recipe(RLConfig, recipe(useful | {key: value}), [])


def test_a_hyper_parameter_with_a_schedule_has_no_other_value(recipe):
    changes = {"alg.schedules.clip_high": {"start": 0.2, "end": 0.3, "steps": 3}}
    assert load_recipe(RLConfig, recipe(changes), []).alg.clip_high == 0.2
    with pytest.raises(UserError, match=r"^alg.clip_high is set and would not be read, because alg.schedules has it"):
        load_recipe(RLConfig, recipe(changes), ["alg.clip_high=0.2"])


OF_ROWS: dict[str, tuple[type, dict[str, Any]]] = {
    "data.train_on is set": (SLConfig, {"alg": {"name": "dpo"}, "data.train_on": ["assistant"]}),
    "ratio is set": (RLConfig, {"data.train": [{"path": "a.jsonl", "ratio": 2.0}]}),
    "split is set": (RLConfig, {"data.train": [{"path": "a.jsonl", "split": "test"}]}),
    "replacement is set": (RLConfig, {"data.eval": {"path": "a.jsonl", "replacement": True}}),
}


@pytest.mark.parametrize("words", OF_ROWS)
def test_keys_of_rows_and_sources(words, recipe):
    cls, changes = OF_ROWS[words]
    with pytest.raises(UserError, match=words):
        load_recipe(cls, recipe(changes, kind="sl" if cls is SLConfig else "rl"), [])


def test_prometheus_shows_no_group():
    said = TrackingConfig(group="a").find_unused(["jsonl", "prometheus"])
    assert said is not None and said.startswith("tracking.group is set, and no tracker shows it")
    assert TrackingConfig(group="a").find_unused(["prometheus", "wandb"]) is None


def test_given_keys():
    given = frozenset(["a.b", "c"])
    assert is_given("a", given) and is_given("a.b", given) and not is_given("a.bc", given)
