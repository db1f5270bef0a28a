"""Optimizers in exact numbers and sentences: Muon's update, groups, probes, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from configs.trainer_schema import TrainerConfig
from core.errors import UserError
from trainers import optimizer_probe
from trainers.muon import Muon, orthogonalize
from trainers.optimizer import make_optimizer
from trainers.optimizer_probe import ProbedOptimizer, check_optimizer, probe_optimizer
from trainers.parameter_groups import group_parameters, set_lr
from trainers.references import clear_moments
from unit_tests.helpers.models import random_model

OWN = "unit_tests.trainers.test_optimizer_tables"


def plain_orthogonalize(matrix: np.ndarray) -> np.ndarray:
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(np.sqrt((x**2).sum()), 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}])
def test_muon_is_the_formula_written_out(shape, settings):
    """Momentum, Nesterov's step, orthogonalised, scaled to the RMS of AdamW's; and decoupled weight decay."""
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=chance)
    groups = [{"params": [weight], "is_matrix": True}]
    calls: list[str] = []

    def gather(parameter, values):
        assert parameter is weight
        calls.append("gather")
        return values

    def cut(parameter, whole):
        assert parameter is weight
        calls.append("cut")
        return whole

    optimizer = Muon(groups, lr=0.5, weight_decay=0.25, gather=gather, cut=cut, **settings)
    beta = settings.get("momentum", 0.95)
    want, mean = weight.double().numpy().copy(), np.zeros(shape)
    for update in range(3):
        lr = 0.5 / (update + 1)
        gradient = torch.randn(shape, generator=chance)
        weight.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        mean = beta * mean + (1 - beta) * gradient.double().numpy()
        towards = plain_orthogonalize((1 - beta) * gradient.double().numpy() + beta * mean)
        want = want * (1 - lr * 0.25) - lr * 0.2 * math.sqrt(max(shape)) * towards
        np.testing.assert_allclose(weight.double().numpy(), want, rtol=2e-4, atol=2e-5)
        assert weight.grad is None
    assert calls == ["gather", "cut"] * 3
    optimizer.step()  # without a gradient
    np.testing.assert_allclose(weight.double().numpy(), want, rtol=2e-4, atol=2e-5)


def test_the_experts_of_a_layer_are_matrices_of_their_own():
    """Seven of three rows and two columns: the scale is of the matrix, however many there are."""
    chance = torch.Generator().manual_seed(0)
    whole, gradient = (torch.randn(7, 3, 2, generator=chance) for _ in range(2))
    parts = [own.clone() for own in whole]
    optimizers = [Muon([{"params": [p], "is_matrix": True}], lr=0.5, weight_decay=0.25) for p in (whole, *parts)]
    for p, own in zip((whole, *parts), (gradient, *gradient), strict=True):
        p.grad = own.clone()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(whole, torch.stack(parts), rtol=1e-5, atol=1e-6)


def test_a_matrix_of_zeros_has_no_direction_and_others_have_their_own():
    assert not orthogonalize(torch.zeros(3, 4)).any()
    pair = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 100.0])[:, None, None]
    for got, one in zip(orthogonalize(pair), pair, strict=True):
        np.testing.assert_allclose(got.numpy(), plain_orthogonalize(one.double().numpy()), rtol=1e-3, atol=1e-4)
    assert orthogonalize(pair.bfloat16()).dtype == torch.bfloat16


def test_muon_is_resumed_with_both_kinds_of_states():
    def make() -> tuple[list[torch.Tensor], Muon]:
        weights = [torch.full((2, 3), 2.0), torch.full((3,), 2.0)]
        groups = [{"params": [w], "is_matrix": w.ndim == 2} for w in weights]
        return weights, Muon(groups, lr=0.1, weight_decay=0.0)

    def step(weights, optimizer) -> None:
        for w in weights:
            w.grad = torch.arange(1.0, w.numel() + 1).reshape(w.shape)
        optimizer.step()

    (weights, first), (others, second) = make(), make()
    step(weights, first)
    for own, saved in zip(others, weights, strict=True):
        own.copy_(saved)
    second.load_state_dict(first.state_dict())
    assert {frozenset(state) for state in second.state.values()} == {
        frozenset({"momentum"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }
    step(weights, first)
    step(others, second)
    assert all(torch.equal(own, other) for own, other in zip(weights, others, strict=True))
    clear_moments(first)
    assert {frozenset(state) for state in first.state.values()} == {frozenset(state) for state in second.state.values()}
    assert all(not value.any() for state in first.state.values() for value in state.values())


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 1.5])
def test_a_momentum_is_from_zero_to_below_one(momentum):
    with pytest.raises(ValueError) as raised:
        Muon([], momentum=momentum)
    assert str(raised.value) == f"momentum={momentum} must be at least 0 and below 1"
    assert Muon([{"params": [torch.zeros(1)], "is_matrix": False}], momentum=0.0).momentum == 0.0


def test_groups_are_by_scale_and_kind_in_the_order_of_their_first_tensors():
    model = random_model("llama", tie_word_embeddings=False)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    scales = {"model.layers.0": 0.5, "*norm*": 2.0, "lm_head": 1.0}
    names = {id(t): name for name, t in tensors.items()}

    def describe(optimizer: str, lr_scales: dict[str, float]) -> list[tuple[float, bool, int, str]]:
        cfg = TrainerConfig(optimizer=optimizer, lr_scales=lr_scales)
        groups = group_parameters(model, cfg, tensors)
        assert all({*group} == {"params", "lr_scale", "is_matrix"} for group in groups)
        return [(g["lr_scale"], g["is_matrix"], len(g["params"]), names[id(g["params"][0])]) for g in groups]

    first, q = "model.embed_tokens.weight", "model.layers.{}.self_attn.q_proj.weight"
    assert describe("adamw", {}) == [(1.0, False, 21, first)]
    assert describe("muon", {}) == [(1.0, False, 7, first), (1.0, True, 14, q.format(0))]
    assert describe("muon", {"model.layers.0": 0.5}) == [
        *((1.0, False, 5, first), (0.5, True, 7, q.format(0))),
        *((0.5, False, 2, "model.layers.0.input_layernorm.weight"), (1.0, True, 7, q.format(1))),
    ]
    assert describe("sgd", scales) == [
        *((1.0, False, 9, first), (0.5, False, 7, q.format(0))),
        (2.0, False, 5, "model.layers.0.input_layernorm.weight"),
    ]


def test_a_rate_is_multiplied_by_the_scale_of_each_group():
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr_scale": 0.25}, {"params": [torch.zeros(1)]}], lr=1.0)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5]


# Optimizers of other packages ---------------------------------------------------------------------------------


class Plain(torch.optim.SGD):
    """Moves by the gradient; states are made by `keep`."""

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(self.keep(p))

    def keep(self, p):
        return {"moment": torch.zeros_like(p), "count": torch.tensor(1.0), "nothing": torch.zeros(())}


class OtherShape(Plain):
    """Keeps a vector for each matrix."""

    def keep(self, p):
        return {"rows": torch.zeros(len(p), dtype=torch.float64)}


class Text(Plain):
    """Keeps a number and a text."""

    def keep(self, p):
        return {"count": 1, "kind": "text"}


class Factored(torch.optim.SGD):
    """Moves by the gradient over the norm of its matrix."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()


class Moving(Plain):
    """Changes a value of its groups."""

    def step(self):
        super().step()
        self.param_groups[0]["updates"] = 1


class OwnRate(Plain):
    """Changes its rate, which the trainer sets before every update."""

    def step(self):
        super().step()
        self.param_groups[0]["lr"] = 9.0


class Refusing(torch.optim.SGD):
    def step(self):
        raise UserError("not this one")


class Broken(torch.optim.SGD):
    def step(self):
        raise ZeroDivisionError("by zero")


def named(kind: type, **trainer) -> TrainerConfig:
    return TrainerConfig(optimizer=f"{OWN}.{kind.__name__}", **trainer)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Plain, (True, True, 4.0, False, None)),
        (OtherShape, (True, False, 8 / 256, False, None)),
        (Text, (True, False, 0.0, False, "str")),
        (Factored, (False, True, 0.0, False, None)),
        (Moving, (True, True, 4.0, True, None)),
        (OwnRate, (True, True, 4.0, False, None)),
    ],
)
def test_a_probe_finds_the_properties_of_an_optimizer(kind, found):
    names = ("is_elementwise", "keeps_by_shape", "state_bytes", "moves_groups", "unsaved")
    for is_sharded in (False, True):
        assert probe_optimizer(named(kind), is_sharded=is_sharded) == ProbedOptimizer(**dict(zip(names, found)))  # noqa: B905


def test_a_probe_draws_no_random_number_of_the_run(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(optimizer_probe, "find_device", lambda: asked.append("asked") or "cpu")
    before = torch.get_rng_state()
    for is_sharded, times in ((True, 0), (False, 1)):
        probe_optimizer(named(Plain), is_sharded=is_sharded)
        assert len(asked) == times and torch.equal(torch.get_rng_state(), before)


ONE, TWO = {"strategy": "fsdp2", "ranks": 1}, {"strategy": "fsdp2", "ranks": 2}
DEEPSPEED = {"strategy": "deepspeed", "ranks": 1}
PARTS = (
    "{}, and trainer ranks on Ray hold parts of tensors: choose another optimizer, trainer.strategy=fsdp2 with "
    "trainer.ranks=1, or backend: local"
)
SHAPES = PARTS.format("keeps states of other shapes than the parameter's")
OTHERS = PARTS.format("computes a number's update from other numbers of its tensor")
ANEW = (
    "keeps numbers in its groups, which a resumed run on Ray would begin anew: choose another optimizer, or backend: "
    "local"
)
HELD = "keeps a state of type str, which FSDP2's checkpoints cannot hold: choose another optimizer, or backend: local"


@pytest.mark.parametrize(
    ("kind", "trainer", "why"),
    [
        *((Plain, trainer, None) for trainer in (ONE, TWO, DEEPSPEED)),
        *((OtherShape, trainer, why) for trainer, why in ((ONE, None), (TWO, SHAPES), (DEEPSPEED, SHAPES))),
        *((Text, trainer, why) for trainer, why in ((ONE, HELD), (TWO, HELD), (DEEPSPEED, SHAPES))),
        *((Factored, trainer, why) for trainer, why in ((ONE, None), (TWO, OTHERS), (DEEPSPEED, OTHERS))),
        *((Moving, trainer, ANEW) for trainer in (ONE, TWO, DEEPSPEED)),
        *((Refusing, trainer, "not this one") for trainer in (ONE,)),
        (Broken, ONE, "fails on a matrix of float32: by zero"),
    ],
)
def test_what_an_optimizer_on_ray_is_refused_for(kind, trainer, why):
    cfg = named(kind, **trainer)
    if why is None:
        check_optimizer(cfg, is_sharded=True)
        return
    with pytest.raises(UserError) as raised:
        check_optimizer(cfg, is_sharded=True)
    assert str(raised.value) == (why if kind is Refusing else f"trainer.optimizer={OWN}.{kind.__name__} {why}")
    if why not in ("not this one", "fails on a matrix of float32: by zero"):
        check_optimizer(cfg, is_sharded=False)


MUON = "trainer.optimizer=muon updates whole matrices, and "
OFFLOAD = {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("trainer", "how", "says"),
    [
        ({"optimizer": "muon"}, {"has_adapter": True}, f"{MUON}an adapter has factors: use adamw"),
        (
            {"optimizer": "muon"},
            {},
            f"{MUON}DeepSpeed's ranks hold parts of flattened ones: set trainer.strategy=fsdp2, or backend=local",
        ),
        (
            {"optimizer": "muon", "optimizer_settings": {"nesterov": 1, "foreach": 1}, **TWO},
            {},
            "trainer.optimizer_settings has foreach, and muon has momentum only: leave it out",
        ),
        (
            {"optimizer": "muon", "optimizer_settings": {"momentum": 1.5}, **TWO},
            {},
            "trainer.optimizer=muon refuses this model or trainer.optimizer_settings: momentum=1.5 must be at least 0 "
            "and below 1",
        ),
        ({"optimizer": "muon", **TWO}, {}, None),
        ({"optimizer": "muon"}, {"is_sharded": False}, None),
        (
            {"optimizer": f"{OWN}.Moving"},
            {"is_cleared": True, "is_sharded": False},
            f"trainer.optimizer={OWN}.Moving keeps numbers in its groups, which reset_optimizer or with_optimizer of "
            "alg would not reset: leave them out, or choose another optimizer",
        ),
        ({"optimizer": f"{OWN}.Moving"}, {"is_sharded": False}, None),
        ({"optimizer": f"{OWN}.Plain"}, {"is_cleared": True}, None),
        (
            {"ema": 0.5, "deepspeed": OFFLOAD},
            {},
            "trainer.deepspeed.zero_optimization.offload_param is set, and trainer.ema is set: for a copy that follows "
            "the policy, its weights must be on the device: leave it out, or set trainer.strategy=fsdp2",
        ),
        ({"ema": 0.5}, {}, None),
        ({"deepspeed": OFFLOAD}, {}, None),
        ({"ema": 0.5, "deepspeed": OFFLOAD}, {"is_sharded": False}, None),
    ],
)
def test_an_optimizer_is_refused_in_one_sentence(trainer, how, says):
    cfg = TrainerConfig(**trainer)
    if says is None:
        check_optimizer(cfg, **{"is_sharded": True} | how)
        return
    with pytest.raises(UserError) as raised:
        check_optimizer(cfg, **{"is_sharded": True} | how)
    assert str(raised.value) == says


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "torch.optim.Nadam",
            "cannot be imported (module 'torch.optim' has no attribute 'Nadam'): install its package, or choose one of "
            "torch.optim",
        ),
        ("no.Lion", "cannot be imported (No module named 'no'): install its package, or choose one of torch.optim"),
        *(
            (path, "is no torch.optim.Optimizer: name a class, such as torch.optim.NAdam")
            for path in ("math.pi", "torch.nn.Linear", "torch.optim.lr_scheduler")
        ),
    ],
)
def test_a_path_that_names_no_optimizer_is_one_sentence(path, says):
    with pytest.raises(UserError) as raised:
        make_optimizer(TrainerConfig(optimizer=path), [torch.zeros(2)])
    assert str(raised.value) == f"trainer.optimizer={path} {says}"


def test_an_optimizer_gets_all_settings_of_the_recipe():
    weight = nn.Parameter(torch.ones(2, 2))
    settings = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.0625}
    for name in ("adamw", "muon"):
        own = {"optimizer_settings": {"momentum": 0.75}} if name == "muon" else {}
        made = make_optimizer(
            TrainerConfig(optimizer=name, **settings, **own), [{"params": [weight], "lr_scale": 1.0, "is_matrix": True}]
        )
        assert {key: made.param_groups[0][key] for key in settings} == settings and made.param_groups[0]["fused"]
        assert getattr(made, "momentum", 0.75) == 0.75
    made = make_optimizer(TrainerConfig(optimizer="sgd", **settings), [weight])
    assert made.param_groups[0]["fused"] and made.param_groups[0]["weight_decay"] == 0.0625
