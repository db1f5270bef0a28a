"""Observers read a run and change nothing of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import main_rl
from algs.sft import SFT
from configs.schema import RLConfig
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import UserError
from data_feeds.packing.batches import plan_update
from driver.load_recipe import load_recipe
from driver.start import observers
from trainers.local import LocalTrainer
from unit_tests.helpers.examples import run_here, some_groups
from unit_tests.helpers.runs import TIMED

pytestmark = pytest.mark.usefixtures("one_thread")
DIGITS = "def score(prompt, messages):\n    return {'digits': sum(map(str.isdigit, messages[-1]['content'])) / 8}\n"
ALL = {
    "capture": {"every": 1, "weights": True},
    "compare_losses": ["gspo", {"as": "again", "name": "ppo"}],
    "profile": {"steps": [0, 1], "memory": True},
}
"""Every observer of an RL run that only watches: rollout.batch_invariant also changes the order of sums."""


def run_into(folder: Path, path: str) -> dict[str, Any]:
    """Return what a run computed: metrics of every step, samples and weights."""
    assert run_here(main_rl, "--config", path, f"run_dir={folder}") == (0, "")
    [made] = folder.iterdir()
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    metrics = [{n: v for n, v in line.items() if not n.startswith(TIMED)} for line in lines]
    return {
        "metrics": metrics,
        "samples": {file.name: file.read_text() for file in sorted((made / "samples").iterdir())},
        "weights": {model: load_file(made / model / "model.safetensors") for model in ("model", "value_model")},
    }


def test_a_run_is_the_same_to_the_bit_with_all_observers_and_with_none(recipe, tmp_path, sums):
    (tmp_path / "digits.py").write_text(DIGITS)
    train = str(sums / "train.parquet")
    changes = {
        "alg": {"name": "ppo", "critic_lr": 1e-3},
        "data.train": [{"path": train, "name": "a"}, {"path": train, "name": "b", "ratio": 2}],
        "reward.function": str(tmp_path / "digits.py"),
        "reward.weights": {"digits": 1.0},
        "updates_per_step": 2,
        "trainer.micro_batch_tokens": 64,
    }
    watched = run_into(tmp_path / "watched", recipe(changes | ALL))
    alone = run_into(tmp_path / "alone", recipe(changes))
    assert set(observers.OF_A_RUN) - {"batch_invariant"} == set(ALL)
    logged, plain = ({name for line in run["metrics"] for name in line} for run in (watched, alone))
    of_observers = logged - plain
    assert of_observers and all(name.startswith("compare_losses/") for name in of_observers)
    assert [{n: v for n, v in line.items() if n not in of_observers} for line in watched["metrics"]] == alone["metrics"]
    assert watched["samples"] == alone["samples"] and alone["samples"]
    for model, weights in alone["weights"].items():
        assert all(torch.equal(tensor, watched["weights"][model][name]) for name, tensor in weights.items()) and weights


def test_a_step_is_the_same_to_the_bit_with_its_sources_measured_or_not(tiny_path):
    groups = some_groups(6, 1)
    groups = [[replace(s, prompt=replace(s.prompt, source="ab"[i % 2]))] for i, [s] in enumerate(groups)]
    settings = {"temperature": 1.0, "total_updates": 2}

    def train(sources: tuple[str, ...]) -> tuple[dict[str, float], torch.Tensor]:
        watching = observers.observe_sources(sources)
        model = ModelConfig(path=tiny_path, dtype="float32")
        trainer = LocalTrainer(model, TrainerConfig(lr=0.1), SFT(), observers=watching, **settings)
        [micro_batches] = plan_update(groups, "token", 40, sources=sources).batches()
        assert len(micro_batches) > 1
        return trainer.step([micro_batches] * 2), trainer.flatten_weights()

    (watched, weights), (alone, alone_weights) = train(("a", "b")), train(())
    assert watched.keys() - alone.keys() == {"loss/a", "loss/b"}
    assert {name: watched[name] for name in alone} == alone and torch.equal(weights, alone_weights)
    assert watched["loss/a"] != watched["loss/b"]


def test_a_missing_part_is_named_in_a_sentence_and_none_is_loaded_unasked(recipe):
    loaded = load_recipe(RLConfig, recipe({"capture.every": 1}), [])
    with pytest.raises(UserError, match=r"^capture needs analysis/taken_away, which this clone lacks: restore"):
        observers.load_plan("capture", "analysis.taken_away.observer", loaded)
    assert [*observers.plan_observers(loaded)] == ["capture"]
    assert observers.plan_observers(load_recipe(RLConfig, recipe(), [])) == {}


def test_a_compared_loss_of_whole_episodes_is_refused_if_they_may_be_split(recipe):
    """To keep them together would change the micro-batches of the run."""
    agent = {"rollout.agent": {"file": "agent.py"}}
    for alg, loss in (("grpo", "gspo"), ("grpo", {"name": "grpo", "correction": {"level": "sequence"}})):
        loaded = load_recipe(RLConfig, recipe(agent | {"alg.name": alg, "compare_losses": [loss]}), [])
        with pytest.raises(UserError, match=r"^compare_losses: \w+ compares episodes as wholes, and an agent's may be"):
            observers.plan_observers(loaded)
    for changes in (agent | {"alg.name": "gspo"}, {"alg.name": "grpo"}):
        observers.plan_observers(load_recipe(RLConfig, recipe(changes | {"compare_losses": ["gspo"]}), []))
