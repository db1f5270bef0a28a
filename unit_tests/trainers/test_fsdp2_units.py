"""Units of FSDP2, and what is said of them before a run; test_deepspeed.py trains with them."""

import operator
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from configs.schema import RLConfig
from configs.trainer_schema import TrainerConfig
from core.errors import UserError
from driver.checks.explain import describe_memory, describe_placement, estimate_memory
from driver.load_recipe import load_recipe
from driver.resume import bitwise_only_changes, check_settings
from modeling.blocks import find_blocks
from modeling.load import load_model
from trainers.compiled import find_compiled_blocks
from trainers.fsdp2 import FsdpLearner, gather
from trainers.fsdp2_units import find_units, settle_shards, shard_model
from trainers.local import TorchLearner
from trainers.optimizer_probe import check_optimizer
from trainers.row_shards import local_part
from unit_tests.helpers.models import random_model
from unit_tests.helpers.seeing import make_model

FSDP = {"backend": "ray", "trainer.strategy": "fsdp2", "trainer.ranks": 4}


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_every_layer_of_both_parts_is_a_block(family):
    model = make_model(family)
    blocks = find_blocks(model, use="it needs", fix="")
    held = [p for block in blocks for p in block.parameters()]
    assert len(held) == len({*held}), "nothing is in two blocks"
    outside = [name for name, p in model.named_parameters() if all(p is not other for other in held)]
    assert outside and not [name for name in outside if ".layers." in name or ".blocks." in name]


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_units_unless_they_are_one(tied):
    model = random_model("llama", tie_word_embeddings=tied)
    ends = [] if tied else [model.get_input_embeddings(), model.get_output_embeddings()]
    assert find_units(model) == [*model.model.layers, *ends]


def test_a_model_without_blocks_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(UserError, match="fsdp2 shards a model block by block, and Own does not say"):
        find_units(Own())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rank_holds_its_part_of_everything(recipe, dtype):
    loaded = load_recipe(RLConfig, recipe(FSDP | {"model.dtype": dtype}), [])
    estimate = estimate_memory(loaded)
    share = estimate.parameters / 4 / 2**30
    assert estimate.per_rank == pytest.approx(share * (4 + 4 + 8)), "float32 weights, gradients, two moments of AdamW"
    assert "4 Ray actors, FSDP2" in dict(describe_placement(loaded.cfg))["trainer"]


@pytest.fixture
def one_rank():
    gpu = ",cuda:nccl" if torch.cuda.is_available() else ""
    distributed.init_process_group(f"cpu:gloo{gpu}", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_blocks_are_found_once_more_when_they_are_sharded(one_rank):
    """FSDP2 makes a class of its own from a block's, and trainer.compile compiles blocks that are sharded."""
    model = random_model("llama")
    settle_shards(model, init_device_mesh("cpu", (1,)), dtype=torch.float32, offload=False)
    assert find_compiled_blocks(model) == [*model.model.layers]


def test_a_sharded_model_has_the_buffers_that_no_file_holds(one_rank, tmp_path):
    """Falcon-H1 multiplies by numbers of its config, in buffers of its layers that the model fills."""
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
    random_model("falcon_h1", ssm_multipliers=[0.5, 2.0, 3.0, 4.0, 5.0], **sizes).save_pretrained(path := str(tmp_path))
    place = partial(shard_model, mesh=init_device_mesh("cpu", (1,)), dtype=torch.float32, offload=False)
    plain, sharded = (load_model(path, dtype="float32", attention="auto", place=p) for p in (None, place))
    assert isinstance(sharded, FSDPModule)
    found = dict(sharded.named_buffers())
    assert any("mup_vector" in name for name in found)
    for name, buffer in plain.named_buffers():
        assert torch.equal(found[name], buffer), name


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_what_is_offloaded_is_held_by_the_cpu_and_computes_the_same(one_rank, device):
    ids = torch.arange(12).reshape(2, 6)
    whole, model = random_model("llama"), random_model("llama")
    whole(ids).logits.square().mean().backward()
    settle_shards(model, init_device_mesh(device, (1,)), dtype=torch.float32, offload=True)
    for _ in range(2):  # the second backward pass adds to a gradient that is on the CPU
        out = model(ids.to(device)).logits
        out.square().mean().backward()
    assert out.device.type == device
    for (name, p), want in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert local_part(p).device.type == local_part(p.grad).device.type == "cpu", name
        assert gather(p, torch.float32).device.type == device, name
        torch.testing.assert_close(local_part(p.grad), 2 * want.grad, rtol=1e-4, atol=1e-7)
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    assert len(groups) > 2 and all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


HERE = {"dtype": torch.float32, "sum_over_ranks": lambda values: values}


class MeshElsewhere(DeviceMesh):
    """A mesh whose ranks have another device than the CPU, for a model whose shards are on the CPU."""

    says = "cpu"

    @property
    def device_type(self) -> str:
        return self.says


def test_offloaded_moments_are_saved_and_restored_where_they_are(one_rank, tmp_path):
    mesh = MeshElsewhere("cpu", [0])
    cfg = TrainerConfig(strategy="fsdp2", offload=True)
    first, second = (FsdpLearner(random_model("llama"), cfg, mesh, **HERE) for _ in range(2))
    first.backward(first.module(torch.arange(12).reshape(2, 6)).logits.square().mean())
    first.update(lr=1e-3, apply=True)
    mesh.says = "meta"  # what is copied there is empty
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    for name, held in first.held.items():
        assert torch.equal(second.held[name], held), name
        want, got = first.optimizer.state[held], second.optimizer.state[second.held[name]]
        assert got.keys() == want.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert want["exp_avg"].any() and all(torch.equal(got[kind], want[kind]) for kind in want), name


EIGHT_BITS = "bitsandbytes.optim.AdamW8bit"
NEEDS_BITSANDBYTES = [  # its import takes seconds
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]
SMALL_ADAM = {"step", "state1", "state2"}
BLOCKS = {"absmax1", "absmax2", "qmap1", "qmap2"}


@pytest.mark.parametrize(
    ("optimizer", "kinds"),
    [
        ("torch.optim.NAdam", [{"step", "mu_product", "exp_avg", "exp_avg_sq"}]),
        ("muon", [{"momentum"}, {"step", "exp_avg", "exp_avg_sq"}]),
        ("torch.optim.Adafactor", [{"step", "row_var", "col_var"}, {"step", "variance"}]),
        pytest.param(EIGHT_BITS, [SMALL_ADAM, SMALL_ADAM | BLOCKS], marks=NEEDS_BITSANDBYTES),
    ],
)
def test_the_states_of_any_optimizer_come_back(one_rank, tmp_path, optimizer, kinds):
    """Small layers of eight bits have moments in float32; that of the MLP has tables and scales of its blocks."""
    cfg, mesh = TrainerConfig(strategy="fsdp2", optimizer=optimizer), init_device_mesh("cpu", (1,))
    check_optimizer(cfg, is_sharded=True)
    first, second = (FsdpLearner(random_model("llama"), cfg, mesh, **HERE) for _ in range(2))
    usual = TorchLearner(random_model("llama"), cfg)
    for update in range(3):
        if update == 2:
            first.save_state(tmp_path / "state")
            second.load_state(tmp_path / "state")
            found = {}
            for name, held in first.held.items():
                want, got = first.optimizer.state[held], second.optimizer.state[second.held[name]]
                assert got.keys() == want.keys() and {*want} in kinds, name
                for kind, value in want.items():
                    assert type(got[kind]) is type(value), (name, kind)
                    is_equal = torch.equal if isinstance(value, torch.Tensor) else operator.eq
                    assert is_equal(got[kind], value), (name, kind)
                    found[kind] = value
            assert all(torch.as_tensor(value).any() for value in found.values())
        for learner in (first, second, usual) if update == 2 else (first, usual):
            learner.backward(learner.module(torch.arange(12).reshape(2, 6)).logits.square().mean())
            learner.update(lr=1e-3, apply=True)
    for name, p in usual.model.named_parameters():
        assert torch.equal(second.held[name], first.held[name]), name
        torch.testing.assert_close(first.held[name], p.detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_a_resume_forgets_weights_that_were_gathered_before(one_rank, tmp_path):
    ids, mesh = torch.arange(12).reshape(2, 6), init_device_mesh("cpu", (1,))
    first, second = (
        FsdpLearner(random_model("llama"), TrainerConfig(strategy="fsdp2"), mesh, **HERE) for _ in range(2)
    )
    first.backward(first.module(ids).logits.square().mean())
    first.update(lr=1e-2, apply=True)
    first.save_state(tmp_path / "state")
    with torch.no_grad():
        want, before = first.module(ids).logits, second.module(ids).logits  # no backward pass frees what it gathered
        second.load_state(tmp_path / "state")
        assert torch.equal(second.module(ids).logits, want) and not torch.equal(before, want)


def test_a_recipe_that_offloads_says_so(recipe):
    loaded = load_recipe(RLConfig, recipe(FSDP | {"trainer.offload": True}), [])
    assert "FSDP2 with its state in the machine's memory" in dict(describe_placement(loaded.cfg))["trainer"]
    assert "all that a GPU holds besides one block's weights" in dict(describe_memory(loaded))["memory per rank"]


def test_the_number_of_ranks_may_change_with_fsdp2_alone():
    then = {"trainer.lr_schedule": "constant", "trainer.strategy": "fsdp2", "trainer.ranks": 2}
    then |= {"trainer.sequence_parallel": 1, "trainer.offload": False}
    check_settings(then, then | {"trainer.ranks": 3})
    assert bitwise_only_changes(then, then | {"trainer.ranks": 3}) == ["trainer.ranks"]
    then |= {"trainer.strategy": "deepspeed"}
    with pytest.raises(UserError, match=r"trainer\.ranks is 3 and was 2"):
        check_settings(then, then | {"trainer.ranks": 3})
    with pytest.raises(UserError, match=r"trainer\.strategy is 'fsdp2' and was 'deepspeed'"):
        check_settings(then, then | {"trainer.strategy": "fsdp2"})
