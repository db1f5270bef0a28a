"""Learner of DeepSpeed with one rank: updates of plain torch, whole blocks, and checkpoints without what is frozen."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from configs.trainer_schema import TrainerConfig
from core.gc_control import without_gc
from trainers.deepspeed import DeepSpeedLearner, DeepSpeedTrainer, read_whole_weights
from trainers.local import TorchLearner
from unit_tests.helpers.collectives import fake_group
from unit_tests.helpers.learner_updates import expect_equal_updates
from unit_tests.helpers.models import random_model

Make = Callable[..., DeepSpeedLearner]


@pytest.fixture
def make_learner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with without_gc():
        importlib.import_module("deepspeed")  # before the group, after which its own groups are as before

    def make(model: nn.Module, **settings: Any) -> DeepSpeedLearner:
        rank: Any = DeepSpeedTrainer.__new__(DeepSpeedTrainer)
        vars(rank).update(cfg=TrainerConfig(**{"optimizer": "sgd"} | settings), dtype="float32", device="cpu", ranks=1)
        rank.start_library(timedelta(seconds=20))
        return rank.make_learner(model)

    with fake_group(0, 1):
        yield make


def test_a_learner_of_deepspeed_makes_the_update_of_plain_torch(make_learner: Make):
    """Clipped, at the rate that is given, with gradients of two micro-batches; and what is not finite is discarded."""
    plain = TorchLearner(random_model("llama"), TrainerConfig(optimizer="sgd", max_grad_norm=0.25))
    ours = make_learner(random_model("llama"), zero_stage=0, max_grad_norm=0.25)
    expect_equal_updates(plain, ours, after_update=lambda: None)
    assert all(one is other for one, other in zip(ours.list_masters(), ours.model.parameters(), strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_that_another_model_skips_leaves_no_trace(make_learner: Make, stage: int):
    """As a policy's, if its critic's gradient is not finite: no weight changes, no moment, and no later update."""
    adamw: Any = {"optimizer": "adamw", "max_grad_norm": 0.25}
    plain = TorchLearner(random_model("llama"), TrainerConfig(**adamw))
    ours = make_learner(random_model("llama"), zero_stage=stage, **adamw)
    ids = torch.arange(12).reshape(2, 6)
    for apply in (False, True, False, False, True):
        before = [p.clone() for p in ours.list_masters()]
        for learner in (plain, ours):
            learner.backward(learner.module(ids).logits.square().mean())
            assert learner.has_finite_gradients()
        norms = [learner.update(lr=0.01, apply=apply) for learner in (plain, ours)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-4) and math.isfinite(norms[1]) == apply
        assert all(map(torch.equal, before, ours.list_masters())) != apply
    exported = {name: t.clone() for bucket in ours.export_weights(10**9) for name, t in bucket}
    for bucket in plain.export_weights(10**9):
        for name, tensor in bucket:
            torch.testing.assert_close(exported[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_deepspeed_has_no_frozen_weights(make_learner: Make, tmp_path: Path):
    model = random_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.1." in name)
    make_learner(model, zero_stage=0).save_state(tmp_path / "policy")
    held = read_whole_weights(tmp_path / "policy")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert held.keys() == trained.keys() and all(torch.equal(held[name], p) for name, p in trained.items())


@pytest.mark.parametrize("is_compiled", [False, True])
def test_zero_3_gathers_whole_blocks_where_they_are_compiled(make_learner: Make, is_compiled: bool):
    """Its hooks inside of a block would cut the code into pieces."""
    from deepspeed.utils import get_z3_leaf_modules

    model: Any = random_model("llama")
    make_learner(model, zero_stage=3, compile=is_compiled)
    assert get_z3_leaf_modules(model) == ([*model.model.layers] if is_compiled else [])
