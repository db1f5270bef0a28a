"""Optimizers that a recipe names by their path."""

import pytest
import torch
from pydantic import ValidationError

from configs.trainer_schema import TrainerConfig
from core.errors import UserError
from trainers.local import TorchLearner
from trainers.optimizer import make_optimizer
from trainers.optimizer_probe import check_optimizer, probe_optimizer


def named(name: str, **settings) -> TrainerConfig:
    return TrainerConfig(optimizer=f"torch.optim.{name}", optimizer_settings=settings, lr=0.1)


@pytest.mark.parametrize(
    ("name", "states"),
    [("Adam", 8), ("NAdam", 8), ("RAdam", 8), ("Adamax", 8), ("Adagrad", 4), ("RMSprop", 4), ("Rprop", 8), ("SGD", 0)],
)
def test_an_optimizer_of_single_numbers_may_have_parts_of_tensors(name, states):
    found = probe_optimizer(named(name))
    assert found.is_elementwise and found.keeps_by_shape and found.state_bytes == states
    check_optimizer(named(name), is_sharded=True)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_an_optimizer_of_whole_matrices_runs_in_one_process_only(name):
    assert not probe_optimizer(named(name)).is_elementwise
    check_optimizer(named(name), is_sharded=False)
    with pytest.raises(UserError, match=f"{name} computes a number's update from other numbers .*backend: local"):
        check_optimizer(named(name), is_sharded=True)


def test_an_update_is_that_of_the_class_with_its_settings():
    cfg = named("NAdam", momentum_decay=0.1)
    learner = TorchLearner(torch.nn.Linear(3, 2), cfg)
    weights = [p.detach().clone().requires_grad_() for p in learner.model.parameters()]
    theirs = torch.optim.NAdam(weights, lr=0.02, momentum_decay=0.1)
    for update in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(update))
        learner.backward(learner.model(x).square().mean())
        learner.update(lr=0.02, apply=True)
        torch.nn.functional.linear(x, *weights).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, cfg.max_grad_norm)
        theirs.step()
        theirs.zero_grad()
    for ours, want in zip(learner.model.parameters(), weights, strict=True):
        torch.testing.assert_close(ours.detach(), want.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": "torch.optim.Adamm"}, "cannot be imported"),
        ({"optimizer": "not_installed.Lion"}, "No module named 'not_installed'.* install its package"),
        ({"optimizer": "torch.optim.lr_scheduler"}, "is no torch.optim.Optimizer"),
        ({"optimizer": "torch.optim.NAdam", "optimizer_settings": {"beta": 1}}, "unexpected keyword argument 'beta'"),
        ({"optimizer": "torch.optim.NAdam", "optimizer_settings": {"eps": -1}}, "Invalid epsilon value"),
        ({"optimizer": "torch.optim.LBFGS"}, "fails on a matrix of float32: .*closure"),
    ],
)
def test_what_is_no_optimizer_is_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        check_optimizer(TrainerConfig(**settings), is_sharded=False)


def test_a_model_that_an_optimizer_does_not_take_is_one_sentence():
    with pytest.raises(UserError, match=r"torch\.optim\.Muon refuses this model"):
        make_optimizer(named("Muon"), [torch.zeros(3, requires_grad=True)])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": "lion"}, "optimizer=lion is not known: choose adamw, sgd, or a path"),
        ({"optimizer": "torch.optim.NAdam", "optimizer_settings": {"lr": 1.0}}, "has lr, which the trainer sets"),
    ],
)
def test_a_wrong_name_is_refused_when_it_is_read(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        TrainerConfig(**settings)
