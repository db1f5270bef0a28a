"""Shards of FSDP2 on one rank: how models become units, what each holds, and what is gathered, exported and saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from algs.grpo import GRPO
from algs.terms import KL
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from modeling.export import ExportedTensor
from modeling.load import load_scalar_model
from modeling.lora import with_adapter
from trainers.fsdp2 import FsdpLearner, FsdpTrainer, narrow_parameters
from trainers.fsdp2_units import find_units, settle_shards, shard_model
from trainers.local import TorchLearner
from trainers.offload.storages import find_storages, find_tensors, identify
from trainers.row_shards import local_part
from unit_tests.helpers.models import random_model

pytestmark = pytest.mark.usefixtures("one_thread")
ALONE: dict[str, Any] = {"dtype": torch.float32, "sum_over_ranks": lambda values: values}
IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def list_groups(model: nn.Module) -> list[Any]:
    """Return the parameter groups of FSDP2's units."""
    units: Any = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return [unit._get_fsdp_state()._fsdp_param_group for unit in units]


@pytest.mark.parametrize("offload", [False, True])
def test_gradients_are_summed_in_float32_and_weights_gathered_in_half(mesh, offload):
    model = random_model("llama", tie_word_embeddings=True).bfloat16()
    model.model.layers[0].requires_grad_(False)
    shard_model(model, mesh, dtype=torch.bfloat16, offload=offload)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    groups = list_groups(model)
    assert len(groups) == 3, "two blocks, and the rest with the tied embedding"
    for group in groups:
        assert group.mp_policy == half and group.gradient_divide_factor == 1.0 and group.force_sum_reduction_for_comms
        assert group.offload_policy == CPUOffloadPolicy(pin_memory=False) or not offload
        assert isinstance(group.offload_policy, CPUOffloadPolicy) == offload
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16), name


def test_a_head_that_was_read_apart_is_tied_again_before_it_is_sharded(mesh):
    model = random_model("llama", tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.zeros(64, 64))
    shard_model(model, mesh, dtype=torch.float32, offload=False)
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_to_the_models_dtype_in_memory_of_their_own(mesh, dtype):
    """The memory that they were read into is freed: it may be a file's."""
    model = random_model("llama", tie_word_embeddings=False)
    model.lm_head.requires_grad_(False)
    want = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    shard_model(model, mesh, dtype=dtype, offload=False)
    buffers = {name: (b.clone(), b.data_ptr()) for name, b in model.named_buffers()}
    read = [StorageWeakRef(local_part(p.detach()).untyped_storage()) for p in model.parameters()]
    assert not any(storage.expired() for storage in read)
    settle_shards(model, mesh, dtype=dtype, offload=False)
    assert all(storage.expired() for storage in read)
    for name, p in model.named_parameters():
        value, is_trained = want[name]
        assert isinstance(p, DTensor) and p.requires_grad == is_trained and p.dtype == torch.float32, name
        assert torch.equal(local_part(p.detach()), value.to(dtype).float()), name
    assert buffers
    for name, buffer in model.named_buffers():
        value, place = buffers[name]
        assert torch.equal(buffer, value) and buffer.data_ptr() != place, name


def test_weights_are_never_held_twice_while_they_are_settled(mesh):
    model = random_model("llama", tie_word_embeddings=False)
    shard_model(model, mesh, dtype=torch.float32, offload=False)
    read = [StorageWeakRef(local_part(p.detach()).untyped_storage()) for p in model.parameters()]
    held: list[int] = []

    class Counted(TorchDispatchMode):
        """Counts the tensors that are held at each copy: those that were read, and the copies before it."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                held.append(len(held) + sum(not storage.expired() for storage in read))
            return func(*args, **kwargs or {})

    with Counted():
        settle_shards(model, mesh, dtype=torch.float32, offload=False)
    assert len(read) > 20 and len(held) == len(read) + len([*model.buffers()])
    assert max(held) <= len(held), "what was read is freed as it is copied"


def test_a_value_model_has_no_head_that_could_be_a_unit(tiny_path):
    model: Any = load_scalar_model(tiny_path, dtype="float32", attention="sdpa")
    assert find_units(model) == [*model.model.layers, model.get_input_embeddings()]


def test_models_of_fsdp2_are_sharded_while_they_are_loaded(mesh, tiny_path):
    rank: Any = FsdpTrainer.__new__(FsdpTrainer)
    rank.mesh, rank.dtype, rank.cfg = mesh, "bfloat16", TrainerConfig(strategy="fsdp2")
    loader = rank.make_loader(ModelConfig(path=tiny_path, attention="sdpa"), GRPO(kl=KL(coef=0.1)))
    policy = loader.load_policy()
    [(names, frozen)] = loader.load_teachers(has_ref_logp=False)
    assert names == ["ref_logp"] and isinstance(policy, FSDPModule) and isinstance(frozen, FSDPModule)
    assert {group.mp_policy.param_dtype for group in list_groups(policy)} == {torch.bfloat16}
    held = rank.hold_frozen(frozen)
    assert held is frozen
    with torch.no_grad():
        held(input_ids=IDS)
    assert all(isinstance(p, DTensor) for p in held.parameters()), "no backward pass frees what was gathered"
    weight = next(policy.parameters())
    assert rank.gather_parameter(weight).dtype == torch.bfloat16 and weight.dtype == torch.float32


def test_what_is_sent_has_the_models_dtype_and_buffers_have_their_own(mesh):
    model = random_model("llama")
    learner = FsdpLearner(model, TrainerConfig(strategy="fsdp2"), mesh, **ALONE | {"dtype": torch.bfloat16})
    sent = {name: t for bucket in learner.export_weights(1000) for name, t in bucket}
    assert sent.keys() == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        assert sent[name].dtype == torch.bfloat16 and torch.equal(sent[name], local_part(p.detach()).bfloat16()), name
    buffer = ExportedTensor(name="b", dtype=torch.float32, parameters=[torch.ones(2)], make=lambda own: own)
    assert narrow_parameters(buffer, torch.bfloat16) is buffer
    trained = replace(buffer, parameters=[nn.Parameter(torch.ones(2))])
    assert narrow_parameters(trained, torch.bfloat16) == replace(trained, dtype=torch.bfloat16)


def test_an_adapter_is_whole_and_its_gradients_are_summed_over_the_ranks(mesh):
    """Two ranks that are alike: the sum is twice a rank's gradient, and it counts once in the norm."""
    plain, model = (with_adapter(random_model("llama"), LoraConfig(r=4), path="here") for _ in range(2))
    cfg = TrainerConfig(optimizer="sgd", max_grad_norm=0.0)
    usual = TorchLearner(plain, cfg)
    ours = FsdpLearner(model, cfg, mesh, **ALONE | {"sum_over_ranks": lambda values: 2 * values})
    for _ in range(2):
        usual.backward(2 * usual.model(IDS).logits.square().mean())
        ours.backward(ours.model(IDS).logits.square().mean())
        assert ours.has_finite_gradients()
        norm = usual.update(lr=0.5, apply=True)
        assert norm > 0 and ours.update(lr=0.5, apply=True) == pytest.approx(norm, rel=1e-4)
    theirs = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) is not p.requires_grad, name
        torch.testing.assert_close(local_part(p.detach()), theirs[name].detach(), rtol=1e-4, atol=1e-6)
    ours.backward(ours.model(IDS).logits.square().mean())
    unused = next(iter(ours.trained.values()))
    unused.grad, before = None, unused.detach().clone()
    assert 0 < ours.update(lr=0.5, apply=True) < float("inf") and torch.equal(unused, before)


def test_an_adapter_is_trained_in_float32_beside_weights_of_half_precision(mesh):
    model = with_adapter(random_model("llama").bfloat16(), LoraConfig(r=4), path="here")
    settle_shards(model, mesh, dtype=torch.bfloat16, offload=False)
    kinds = {(isinstance(p, DTensor), p.requires_grad, p.dtype) for p in model.parameters()}
    assert kinds == {(True, False, torch.bfloat16), (False, True, torch.float32)}


class HalfMoment(torch.optim.SGD):
    """Keeps its last gradient in half precision."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["last"] = p.grad.bfloat16()


def test_a_moment_comes_back_in_its_dtype(mesh, tmp_path):
    cfg = TrainerConfig(strategy="fsdp2", optimizer=f"{__name__}.HalfMoment")
    first, second = (FsdpLearner(random_model("llama"), cfg, mesh, **ALONE) for _ in range(2))
    first.backward(first.module(IDS).logits.square().mean())
    first.update(lr=1e-3, apply=True)
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    for name in first.held:
        want, got = (learner.optimizer.state[learner.held[name]]["last"] for learner in (first, second))
        assert got.dtype == want.dtype == torch.bfloat16 and torch.equal(got, want), name
    second.clear_moments()
    assert not second.optimizer.state, "as of a new one"


def test_the_part_of_a_sharded_tensor_is_offloaded_with_its_gradient(mesh):
    learner = FsdpLearner(random_model("llama"), TrainerConfig(strategy="fsdp2"), mesh, **ALONE)
    learner.backward(learner.module(IDS).logits.square().mean())
    p: Any = next(iter(learner.trained.values()))
    assert not any(isinstance(t, DTensor) for t in find_tensors(p))
    found = {identify(storage) for storage in find_storages(p, device="cpu")}
    assert {identify(local_part(t.detach()).untyped_storage()) for t in (p, p.grad)} <= found
