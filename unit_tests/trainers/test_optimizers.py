"""Muon, optimizers that a recipe names by their path, and learning rates of parts."""

import copy
from collections import OrderedDict
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from algs.grpo import GRPO
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.errors import UserError
from driver.checks.models import check_freeze
from modeling.freeze import match_names
from modeling.lora import with_adapter
from trainers.local import TorchLearner
from trainers.muon import list_matrices, orthogonalize
from trainers.optimizer import make_optimizer
from trainers.optimizer_probe import check_optimizer, probe_optimizer
from trainers.parameter_groups import set_lr
from trainers.references import clear_moments
from unit_tests.helpers.models import random_model


def named(name: str, **settings) -> TrainerConfig:
    """With the small learning rate of the default, which must not hide what an update depends on."""
    return TrainerConfig(optimizer=f"torch.optim.{name}", optimizer_settings=settings)


@pytest.mark.parametrize(
    ("name", "states"),
    [("Adam", 8), ("NAdam", 8), ("RAdam", 8), ("Adamax", 8), ("Adagrad", 4), ("RMSprop", 4), ("Rprop", 8), ("SGD", 0)],
)
def test_an_optimizer_of_single_numbers_may_have_parts_of_tensors(name, states):
    found = probe_optimizer(named(name), is_sharded=False)
    assert found.is_elementwise and found.keeps_by_shape and found.state_bytes == states
    check_optimizer(named(name), is_sharded=True)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_an_optimizer_of_whole_matrices_runs_in_one_process_only(name):
    assert not probe_optimizer(named(name), is_sharded=False).is_elementwise
    check_optimizer(named(name), is_sharded=False)
    with pytest.raises(UserError, match=f"{name} computes a number's update from other numbers .*backend: local"):
        check_optimizer(named(name), is_sharded=True)


@pytest.mark.parametrize(
    ("trainer", "is_whole"),
    [
        ({"strategy": "fsdp2", "ranks": 1}, True),
        ({"strategy": "fsdp2", "ranks": 2}, False),
        ({"strategy": "deepspeed", "ranks": 1}, False),
    ],
)
def test_an_optimizer_of_whole_matrices_runs_where_a_rank_has_them(trainer, is_whole):
    cfg = TrainerConfig(optimizer="torch.optim.Adafactor", **trainer)
    with nullcontext() if is_whole else pytest.raises(UserError, match=r"hold parts of tensors: .*ranks=1"):
        check_optimizer(cfg, is_sharded=True)


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


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest():
    """Torch's computes in bfloat16, whose rounding the iteration makes larger."""
    cfg = TrainerConfig(optimizer="muon", lr=0.02, weight_decay=0.1, max_grad_norm=0.0)
    model, ids = random_model("llama", tie_word_embeddings=False), torch.arange(12).reshape(2, 6)
    theirs = copy.deepcopy(model)
    learner, named = TorchLearner(model, cfg), dict(theirs.named_parameters())
    layers = [p for name, p in named.items() if ".layers." in name and p.ndim == 2]
    rest = [p for p in named.values() if all(p is not other for other in layers)]
    assert len(layers) == 14 and len(rest) == 7, "two blocks of seven matrices"
    kind = {"lr": 0.02, "weight_decay": 0.1}
    optimizers = [torch.optim.Muon(layers, adjust_lr_fn="match_rms_adamw", **kind), torch.optim.AdamW(rest, **kind)]
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        learner.backward(learner.model(ids).logits.square().mean())
        for name, p in model.named_parameters():
            named[name].grad = p.grad.clone()
        learner.update(lr=0.02, apply=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, (name, want), start in zip(model.parameters(), named.items(), before, strict=True):
        exact = 0.25 if any(want is p for p in layers) else 1e-6
        assert (ours - want).norm() < exact * (want - start).norm(), name


@pytest.mark.parametrize("shape", [(24, 9), (9, 24), (3, 8, 8)])
def test_an_orthogonal_update_has_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s /= s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert ((s > 0.6) & (s < 1.3)).all()
    torch.testing.assert_close(orthogonalize(matrix).double(), (u * s[..., None, :]) @ v, rtol=1e-4, atol=1e-5)


def test_muon_leaves_embeddings_heads_scores_and_routers_to_adamw():
    names = list_matrices(random_model("qwen3_moe", tie_word_embeddings=False))
    assert not [name for name in names if "embed" in name or "lm_head" in name or "norm" in name]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names and "model.layers.0.mlp.gate.weight" not in names
    assert "transformer.h.0.attn.c_attn.weight" in list_matrices(random_model("gpt2"))
    block = nn.ModuleDict({"router": nn.Linear(4, 2), "experts": nn.ModuleList([nn.Linear(4, 4)])})
    assert list_matrices(block) == {"experts.0.weight"}
    scored = nn.Sequential(OrderedDict(body=nn.Linear(2, 2), score=nn.Linear(2, 1)))
    assert list_matrices(scored) == {"body.weight"}


def test_parts_of_a_model_have_learning_rates_of_their_own():
    scales = {"model.layers.0": 0.5, "model.layers.1": 0.25, "lm_head": 2.0}
    model, ids = random_model("llama", tie_word_embeddings=True), torch.arange(12).reshape(2, 6)
    learner = TorchLearner(model, TrainerConfig(optimizer="sgd", max_grad_norm=0.0, lr_scales=scales))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner.backward(model(ids).logits.square().mean())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    learner.update(lr=0.1, apply=True)
    for name, p in model.named_parameters():
        # the head is tied to the embedding
        wanted = next((s for part, s in (("layers.0", 0.5), ("layers.1", 0.25), ("embed", 2.0)) if part in name), 1.0)
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * wanted * gradients[name], msg=name)


@pytest.mark.parametrize(
    ("scales", "sentence"),
    [
        ({"model.layer.0": 0.5}, r"trainer.lr_scales: 'model.layer.0' matches no parameter of .*model.layers"),
        ({"model.layers.1": 0.5}, r"'model.layers.1' names frozen parameters only"),
        ({"model.*": 0.5, "*.layers.0": 0.1}, r"'model.\*' and '\*.layers.0' both match model.layers.0"),
    ],
)
def test_a_scale_without_a_meaning_is_refused_before_the_start(tiny_path, scales, sentence):
    trainer = TrainerConfig(lr_scales=scales, freeze=["model.layers.1"])
    with pytest.raises(UserError, match=sentence):
        check_freeze(SimpleNamespace(model=ModelConfig(path=tiny_path), trainer=trainer), GRPO())


def test_patterns_name_the_layers_of_an_adapter_as_those_of_the_model():
    model = with_adapter(random_model("llama"), LoraConfig(r=4), path="here")
    names = match_names(model, "model.layers.0")
    assert names and all(".layers.0." in name for name in names)


def test_a_local_run_with_muon_is_resumed(tmp_path):
    ids = torch.arange(12).reshape(2, 6)
    first, second = (TorchLearner(random_model("llama"), TrainerConfig(optimizer="muon")) for _ in range(2))
    for update in range(3):
        if update == 2:
            first.save_state(tmp_path / "state")
            second.load_state(tmp_path / "state")
        for learner in (first, second)[: 2 if update == 2 else 1]:
            learner.backward(learner.model(ids).logits.square().mean())
            learner.update(lr=0.01, apply=True)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_eight_bit_adam_learns_as_adam_and_is_resumed_to_the_bit(tmp_path):
    """Tensors below 4096 numbers have moments in float32, and this layer has more."""
    cfg = TrainerConfig(optimizer="bitsandbytes.optim.AdamW8bit", optimizer_settings={"weight_decay": 0.0})
    assert 2 < probe_optimizer(cfg, is_sharded=False).state_bytes < 2.2, "in place of 8"
    check_optimizer(cfg, is_sharded=False)
    with pytest.raises(UserError, match=r"AdamW8bit computes a number's update from other numbers .*backend: local"):
        check_optimizer(cfg, is_sharded=True)
    adam = TrainerConfig(lr=0.1)
    learners = [TorchLearner(make_layer(), one) for one in (cfg, cfg, adam)]
    first, second, usual = learners
    for update in range(3):
        if update == 2:
            first.save_state(tmp_path / "state")
            second.load_state(tmp_path / "state")
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(update))
        for learner in learners if update == 2 else (first, usual):
            learner.backward(learner.model(x).square().mean())
            learner.update(lr=0.01, apply=True)
    ours, resumed, want = (learner.model.weight.detach() for learner in learners)
    assert torch.equal(ours, resumed)
    assert 0 < (ours - want).norm() < 0.2 * (want - make_layer().weight.detach()).norm()


def make_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 80, bias=False)


class InEightBits(torch.optim.Optimizer):
    """Momentum in 8 bits with a table of values, in blocks of a tensor; its learning rate is a tensor."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": torch.tensor(lr)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.full(p.shape, 128, dtype=torch.uint8)
                    state["table"] = torch.linspace(-1, 1, 257)
                    state["largest"] = torch.zeros(1)
                moment = state["table"][state["moment"].long()] * state["largest"] + p.grad
                state["largest"] = moment.abs().max().reshape(1)
                state["moment"] = ((moment / state["largest"] + 1) * 127.5).round().to(torch.uint8)
                p -= moment * group["lr"].to(p.dtype)


def test_moments_in_eight_bits_run_in_one_process_and_are_cleared():
    cfg = TrainerConfig(optimizer=f"{__name__}.InEightBits", max_grad_norm=0.0)
    found = probe_optimizer(cfg, is_sharded=False)
    assert not found.is_elementwise and not found.keeps_by_shape and 1 <= found.state_bytes < 1.1
    with pytest.raises(UserError, match="computes a number's update from other numbers"):
        check_optimizer(cfg, is_sharded=True)
    learner = TorchLearner(torch.nn.Linear(3, 2), cfg)
    moved = []
    for update in range(3):
        before = learner.model.weight.detach().clone()
        learner.backward(learner.model(torch.ones(1, 3)).sum())
        learner.update(lr=0.5, apply=True)
        moved.append(float((before - learner.model.weight.detach()).mean()))
        if update == 0:
            learner.clear_moments()
    assert moved == pytest.approx([0.5, 0.5, 1.0], rel=0.01), "the rate of the update; momentum begins anew"


@pytest.mark.parametrize(
    ("name", "settings"),
    [("AdamW", {}), ("NAdam", {}), ("Rprop", {}), ("Adagrad", {"initial_accumulator_value": 0.5})],
)
def test_a_cleared_optimizer_goes_on_as_a_new_one(name, settings):
    cfg = named(name, **settings)
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    cleared, new = (weights.clone().requires_grad_() for _ in range(2))
    gradients = [torch.randn(3, 4, generator=torch.Generator().manual_seed(1 + i)) for i in range(4)]
    optimizers = [make_optimizer(cfg, [p]) for p in (cleared, new)]
    for update, gradient in enumerate(gradients):
        if update == 2:
            groups = optimizers[0].param_groups
            groups[0]["params"] = []  # as ZeRO-3 has it between two updates
            clear_moments(optimizers[0])
            groups[0]["params"] = [cleared]
            optimizers[1] = make_optimizer(cfg, [new])
        for p, optimizer in zip((cleared, new), optimizers, strict=True):
            p.grad = gradient.clone()
            set_lr(optimizer, 0.1)
            optimizer.step()
    assert torch.equal(cleared, new)


class ByNormOfAll(torch.optim.SGD):
    """Divides gradients by the norm of all that it is given."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p -= group["lr"] * p.grad / norm


class Counting(torch.optim.SGD):
    """Counts its updates in the group, as those do that estimate their rate."""

    def step(self):
        super().step()
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1


class WithList(torch.optim.SGD):
    """Keeps a list among its states."""

    def step(self):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["updates"] = [1]


class WithFlag(WithList):
    """Keeps a truth value, which is no number of a checkpoint."""

    def step(self):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["updates"] = True


class WithCount(WithList):
    """Keeps a tensor whose dtype is that of Python's numbers in checkpoints."""

    def step(self):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["updates"] = torch.tensor(1)


@pytest.mark.parametrize(
    ("kind", "ranks", "why"),
    [
        (ByNormOfAll, 2, "computes a number's update from other numbers of its tensor, and trainer ranks on Ray"),
        (Counting, 1, "keeps numbers in its groups, which a resumed run on Ray would begin anew"),
        (WithList, 1, "keeps a state of type list, which FSDP2's checkpoints cannot hold"),
        (WithFlag, 1, "keeps a state of type bool"),
        (WithCount, 1, "keeps a state of type torch.int64 without dimensions"),
    ],
)
def test_an_optimizer_that_ranks_cannot_split_or_save_runs_locally(kind, ranks, why):
    cfg = TrainerConfig(optimizer=f"{__name__}.{kind.__name__}", strategy="fsdp2", ranks=ranks)
    check_optimizer(cfg, is_sharded=False)
    with pytest.raises(UserError, match=f"{kind.__name__} {why}.*or backend: local"):
        check_optimizer(cfg, is_sharded=True)


def test_a_rate_that_is_a_tensor_is_scaled_for_each_group():
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups = [{"params": [w], "lr_scale": scale} for w, scale in zip(weights, (0.5, 2.0), strict=True)]
    optimizer = InEightBits(groups, lr=0.0)
    for lr in (0.5, 0.25):
        set_lr(optimizer, lr)
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5 * lr, 2 * lr]


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
        ({"optimizer": "lion"}, "optimizer=lion is not known: choose adamw, sgd, muon, or a path"),
        ({"optimizer": "torch.optim.NAdam", "optimizer_settings": {"lr": 1.0}}, "has lr, which the trainer sets"),
    ],
)
def test_a_wrong_name_is_refused_when_it_is_read(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        TrainerConfig(**settings)
