"""A key that was set and does nothing is refused by a rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from pydantic import BaseModel

import main_rl
import main_sl
from configs.load import read_recipe, sections_in
from configs.schema import RLConfig, SLConfig
from core.errors import UserError
from core.strict_model import StrictModel
from driver.checks.unused_keys import RULES, TERM_RULES, is_given, list_given
from driver.load_recipe import load_recipe

ROOT = Path(__file__).parent.parent.parent
SCHEMA = (RLConfig, SLConfig)

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
    "trainer.share_prefixes": ("auto", {}),
    "data.max_image_pixels": (10_000, {"model.path": "models/made_later"}),
    "trainer.vision": ("frozen", {"model.path": "models/made_later"}),
    "model.lora.vision": (True, {"model.path": "models/made_later"}),
    "trainer.zero_stage": (2, {}),
    "trainer.deepspeed": ({"prescale": True}, {}),
    "trainer.offload": (True, {"trainer.strategy": "fsdp2"}),
}
DEAD = {
    **{key: {"trainer.optimizer": "sgd"} for key in ("trainer.betas", "trainer.eps")},
    **{key: {"trainer.strategy": "fsdp2"} for key in ("trainer.zero_stage", "trainer.deepspeed")},
    "trainer.share_prefixes": {"trainer.layout": "padded"},
    "rollout.restarts": {"placement": "colocate"},
}
"""Settings with which a key is of no use, where that is not so by default."""


def test_every_rule_has_an_example():
    assert sorted(UNUSED) == sorted(key for rule in RULES for key in rule.keys)


@pytest.mark.parametrize("key", UNUSED)
def test_a_key_of_no_use_is_refused_and_loads_where_it_is_of_use(key, recipe):
    value, useful = UNUSED[key]
    with pytest.raises(UserError, match=f"^{key} is set and would not be read, because .*: leave it out$"):
        load_recipe(RLConfig, recipe(DEAD.get(key, {}) | {key: value}), [])
    load_recipe(RLConfig, recipe(useful | {key: value}), [])


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


def test_given_keys():
    given = list_given({"a": {"b": 1}, "c": [1]})
    assert is_given("a", given) and is_given("a.b", given) and not is_given("a.bc", given)


TERMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "alg.kl.place": ("reward", {"alg.kl.coef": 0.1}),
    "alg.kl.estimator": ("k2", {"alg.kl.coef": 0.1}),
    "alg.overlong.max_tokens": (8, {"alg.overlong.mode": "penalty", "alg.overlong.buffer": 4}),
    "alg.overlong.buffer": (4, {"alg.overlong.mode": "penalty"}),
    "alg.overlong.coef": (0.5, {"alg.overlong.mode": "penalty", "alg.overlong.buffer": 4}),
    "alg.correction.mode": ("mask", {}),
    "alg.correction.high": (3.0, {}),
    "alg.correction.low": (0.1, {"alg.correction.mode": "clip"}),
    "alg.correction.token_high": (3.0, {"alg.correction.level": "geometric", "alg.correction.mode": "mask"}),
}
NO_CORRECTION = {f"alg.correction.{key}": {"alg.correction.level": "none"} for key in ("mode", "high")}


def test_every_rule_of_the_terms_has_an_example():
    assert sorted(TERMS) == sorted(key for rule in TERM_RULES for key in rule.keys)


@pytest.mark.parametrize("key", TERMS)
def test_a_key_of_a_term_that_is_off_is_refused_and_loads_where_it_is_on(key, recipe):
    value, useful = TERMS[key]
    with pytest.raises(UserError, match=f"^{key} is set and would not be read, because .*: leave it out$"):
        load_recipe(RLConfig, recipe(NO_CORRECTION.get(key, {}) | {key: value}), [])
    load_recipe(RLConfig, recipe(useful | {key: value}), [])


def test_our_recipes_set_no_key_that_nothing_reads():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if "groups_per_step" in read_recipe(str(path)):
            load_recipe(RLConfig, str(path), [])


def list_keys(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, class that declares it, field) for every key of the schema."""
    for name, info in cls.model_fields.items():
        inside = sections_in(info.annotation)
        yield prefix + name, cls.__name__, name
        for section in inside:
            yield from list_keys(section, f"{prefix}{name}.")


@contextmanager
def recording() -> Iterator[set[tuple[str, str]]]:
    """Record (class, field) of every setting that is read."""
    reads: set[tuple[str, str]] = set()
    plain = StrictModel.__getattribute__

    def read(self: Any, name: str) -> Any:
        cls = type(self)
        if name in cls.__pydantic_fields__:
            reads.add((cls.__name__, name))
        return plain(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StrictModel, "__getattribute__", read, raising=False)
        yield reads


ELSEWHERE = {
    # key: the file that reads it, where no run in one process does
    "alg": "driver/load_recipe.py",
    "ray_address": "driver/context.py",
    "ship_code": "driver/context.py",
    "max_resumes": "driver/on_failure.py",
    "model.lora.vision": "modeling/lora.py",
    "trainer.strategy": "driver/start/trainers.py",
    "trainer.offload": "trainers/fsdp2.py",
    "trainer.zero_stage": "trainers/deepspeed.py",
    "trainer.deepspeed": "trainers/deepspeed.py",
    "rollout.restarts": "driver/rl/setup.py",
    "rollout.num_engines.min": "configs/rollout_schema.py",
    "rollout.num_engines.max": "configs/rollout_schema.py",
    "rollout.sleep_mode": "driver/start/rollouts.py",
    "rollout.agent.file": "rollouts/registry.py",
    "rollout.agent.command": "rollouts/registry.py",
    "push_to": "driver/checks/hub_upload.py",
    "capture.grad_norm_times": "analysis/capture/triggers.py",
    "tracking.samples_every": "driver/context.py",
    "tracking.samples": "driver/context.py",
    "tracking.mlflow_uri": "driver/records/trackers/mlflow.py",
    "tracking.mlflow_experiment": "driver/records/trackers/mlflow.py",
    "tracking.wandb_project": "driver/records/trackers/wandb.py",
    "tracking.wandb_entity": "driver/records/trackers/wandb.py",
    "tracking.wandb_mode": "driver/records/trackers/wandb.py",
}


def test_every_key_of_the_schema_is_read_by_a_run_or_has_a_reader_by_name(recipe, tmp_path, sums, tiny_path):
    """Reads while a recipe is validated do not count: a rule that refuses a key does not make it do something."""
    ours = str(sums / "train.parquet")
    rl = {
        "data.train": [{"path": ours, "name": "a"}, {"path": ours, "name": "b", "ratio": 2.0}],
        "data.eval": {"path": str(sums / "eval.parquet")},
        "eval_every": 1,
        "checkpoint.every": 1,
        "save_to": str(tmp_path / "copy"),
        "stop_when": {"metric": "train/lr", "above": 1e9},
        "model.lora": {"r": 2},
        "trainer.lr_schedule": "wsd",
        "trainer.decay_fraction": 0.5,
        "capture": {"on": ["kl", "grad_norm"], "weights": True},
    }
    saved = str(tmp_path / "saved")
    Dataset.from_parquet(str(sums / "sft.parquet")).save_to_disk(saved)
    sl = {"stop_when": {"metric": "train/lr", "below": 1.0}, "data.train": [{"path": saved}]}
    sl["data.eval"] = str(sums / "sft.parquet")
    in_rl = load_recipe(RLConfig, recipe(rl), [])
    in_sl = [load_recipe(SLConfig, recipe(changes, kind="sl"), []) for changes in ({}, sl)]
    with recording() as reads:
        main_rl.launch(in_rl)
        for loaded in in_sl:
            main_sl.launch(loaded)
    keys = {key for cls in SCHEMA for key, owner, name in list_keys(cls) if (owner, name) not in reads}
    assert sorted(keys - {*ELSEWHERE}) == []
    for key, file in ELSEWHERE.items():
        read = rf"\b(cfg|rollout|agent|trainer|tracking|settings|lora|num_engines)\.{key.rpartition('.')[2]}\b"
        assert re.search(read, (ROOT / file).read_text(encoding="utf-8")), f"{file} does not read {key}"
