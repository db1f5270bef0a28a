"""A key that was set and does nothing is refused: by a rule of the schema, or because no process read it."""

from __future__ import annotations

import json
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
from driver.checks.unused_keys import RULES, is_given, list_given
from driver.load_recipe import load_recipe
from unit_tests.helpers.examples import run_here

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


MINE = """
from algs.base import PolicyGradient
from algs.credit import group_advantages

class Mine(PolicyGradient):
    used: float = 1.0
    unused: float = 1.0
    of_advantages: float = 1.0

    def compute_advantages(self, groups):
        return [
            [s.with_advantage(a * self.of_advantages) for s, a in zip(g, group_advantages([s.reward for s in g]))]
            for g in groups
        ]

    def loss(self, policy, tokens):
        return -self.used * tokens.advantage * policy.logp, {}
"""
READ = [{"used": 2.0, "of_advantages": 1.0}, {"kl": {"coef": 0.1, "place": "loss"}}, {"loss_norm": "sequence"}]
UNREAD = {
    "unused": {"unused": 1.0, "used": 2.0},
    "kl.estimator": {"kl": {"coef": 0.0, "estimator": "k2"}},
    "overlong.coef": {"overlong": {"coef": 0.5}},
    "correction.low": {"correction": {"low": 0.1, "high": 3.0}},
}


def run_mine(recipe, tmp_path, settings: dict[str, Any]) -> tuple[int, str]:
    (tmp_path / "mine.py").write_text(MINE)
    alg = {"file": str(tmp_path / "mine.py")} | settings
    return run_here(main_rl, "--config", recipe({"alg": alg, "steps": 1}))


@pytest.mark.parametrize("settings", READ, ids=lambda s: next(iter(s)))
def test_a_hyper_parameter_that_is_read_anywhere_is_in_order(settings, recipe, tmp_path):
    code, err = run_mine(recipe, tmp_path, settings)
    assert code == 0, err


@pytest.mark.parametrize("name", UNREAD)
def test_a_hyper_parameter_that_nothing_reads_ends_the_run_and_is_named(name, recipe, tmp_path):
    code, err = run_mine(recipe, tmp_path, UNREAD[name])
    assert code == 2 and err.startswith(f"error: alg.{name} is set, and nothing has read it"), err
    [folder] = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["exit_reason"].startswith("stopped: alg.")


SCALED = "from algs.base import Algorithm\nclass Scaled(Algorithm):\n    temper: float = 1.0\n    left: float = 1.0\n"
SCALED += "    def loss(self, policy, tokens):\n        return -self.temper * policy.logp, {}\n"


@pytest.mark.slow
def test_hyper_parameters_are_watched_in_trainers_of_their_own(recipe, tmp_path):
    """On Ray only the trainers call the loss: `temper` is read there, and `left` nowhere."""
    (tmp_path / "scaled.py").write_text(SCALED)
    alg = {"file": str(tmp_path / "scaled.py"), "temper": 2.0, "left": 2.0}
    changes = {"alg": alg, "backend": "ray", "steps": 1, "trainer.ranks": 2}
    code, err = run_here(main_sl, "--config", recipe(changes, kind="sl"))
    assert code == 2 and "error: alg.left is set, and nothing has read it" in err, err


ALGORITHMS = {
    path.stem: raw["alg"]
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if "groups_per_step" in (raw := read_recipe(str(path))) and len(raw["alg"]) > 1
}
"""Hyper-parameters that our own RL recipes set."""
VARIED = "def score(prompt, messages):\n    return {'correct': float(sum(map(ord, messages[-1]['content'])) % 2)}\n"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_our_recipes_set_no_hyper_parameter_that_nothing_reads(name, recipe, tmp_path):
    (tmp_path / "varied.py").write_text(VARIED)
    changes = {
        "alg": ALGORITHMS[name],
        "steps": 1,
        "updates_per_step": 2,
        "reward.function": str(tmp_path / "varied.py"),
    }
    if "credit" in ALGORITHMS[name]:
        changes |= UNUSED["alg.credit"][1]
    code, err = run_here(main_rl, "--config", recipe(changes))
    assert code == 0, err


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
