"""Learner of DeepSpeed with one rank: updates of plain torch, whole blocks, and checkpoints without what is frozen."""

from __future__ import annotations

import importlib
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
from unit_tests.helpers.models import random_model

Make = Callable[..., DeepSpeedLearner]


@pytest.fixture
def make_learner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    # as a trainer of one rank sets them; another test of this process may have left others
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with without_gc():
        importlib.import_module("deepspeed")  # before the group, after which its own groups are as before

    def make(model: nn.Module, **settings: Any) -> DeepSpeedLearner:
        rank: Any = DeepSpeedTrainer.__new__(DeepSpeedTrainer)
        vars(rank).update(cfg=TrainerConfig(optimizer="sgd", **settings), dtype="float32", device="cpu", ranks=1)
        rank.start_library(timedelta(seconds=20))
        return rank.make_learner(model)

    with fake_group(0, 1):
        yield make


def test_a_learner_of_deepspeed_makes_the_update_of_plain_torch(make_learner: Make):
    """Clipped, at the rate that is given, with gradients of two micro-batches; and what is not finite is discarded."""
    ids = torch.arange(12).reshape(2, 6)
    plain = TorchLearner(random_model("llama"), TrainerConfig(optimizer="sgd", max_grad_norm=0.25))
    ours = make_learner(random_model("llama"), zero_stage=0, max_grad_norm=0.25)
    norms: list[tuple[float, float]] = []
    for scale in (1.0, 100.0, float("inf"), 1.0):
        for learner in (plain, ours):
            for _ in range(2):
                learner.backward(learner.module(ids).logits.square().mean() * scale)
        finite = plain.has_finite_gradients(), ours.has_finite_gradients()
        assert finite == (scale != float("inf"),) * 2
        norms.append((plain.update(lr=0.5, apply=finite[0]), ours.update(lr=0.5, apply=finite[1])))
    assert [one for one, _ in norms] == pytest.approx([other for _, other in norms], rel=1e-4)
    assert norms[2] == (float("inf"),) * 2 and norms[0][0] > 0.25
    exported = {name: t for bucket in ours.export_weights(1000) for name, t in bucket}
    for bucket in plain.export_weights(10**9):
        for name, tensor in bucket:
            torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=1e-6)
    assert all(one is other for one, other in zip(ours.list_masters(), ours.model.parameters(), strict=True))


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
