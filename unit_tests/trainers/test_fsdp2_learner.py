"""Learner of FSDP2 with one rank: gradients, norms, updates and copies are those of plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from configs.trainer_schema import TrainerConfig
from trainers.fsdp2 import FsdpLearner, MatrixParts, gather
from trainers.local import TorchLearner
from trainers.row_shards import local_part
from unit_tests.helpers.learner_updates import expect_equal_updates
from unit_tests.helpers.models import random_model


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_parts_of_a_matrix_are_gathered_and_cut_unless_they_are_experts(mesh):
    """Of one rank, whose rows are the whole; experts are whole on the ranks that have them."""
    whole = torch.arange(6.0).reshape(3, 2)
    rows = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    experts = nn.Parameter(torch.ones(2, 3, 2))
    held, own = local_part(rows.detach()), experts.detach()
    parts = MatrixParts({held: rows, own: experts})
    values = torch.full((3, 2), 7.0, dtype=torch.float64)
    assert torch.equal(parts.gather(held, values), values) and parts.gather(held, values).dtype == torch.float64
    assert type(parts.gather(held, values)) is Tensor
    assert torch.equal(parts.cut(held, whole), whole) and parts.gather(own, own) is own and parts.cut(own, own) is own
    assert gather(rows, torch.bfloat16).dtype == torch.bfloat16 and torch.equal(gather(rows, torch.float32), whole)
    plain = nn.Parameter(torch.ones(2))
    assert gather(plain, torch.bfloat16).dtype == torch.float32 and not gather(plain, torch.bfloat16).requires_grad


def test_a_learner_of_fsdp2_makes_the_update_of_plain_torch(mesh, tmp_path):
    """Clipped, at the rate that is given, with gradients of two micro-batches; and what is not finite is discarded."""
    cfg = TrainerConfig(optimizer="sgd", max_grad_norm=0.25)
    plain = TorchLearner(random_model("llama"), cfg)
    ours = FsdpLearner(random_model("llama"), cfg, mesh, dtype=torch.float32, sum_over_ranks=lambda values: values)

    def hold_no_gradients() -> None:
        assert all(p.grad is None for p in (*plain.master, *ours.trained.values(), *ours.held.values()))

    expect_equal_updates(plain, ours, after_update=hold_no_gradients)
    assert ours.has_finite_gradients(), "there are none"
    ours.sum_over_ranks = lambda values: values + 1
    assert not ours.has_finite_gradients(), "another rank has one"
    assert [*ours.held] == [*ours.trained] and len(ours.list_masters()) == len(ours.held)
    copies = [torch.full_like(held, n) for n, held in enumerate(ours.list_masters())]
    ours.save_copies(copies, tmp_path)
    found = [torch.zeros_like(held) for held in copies]
    ours.load_copies(found, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(copies, found, strict=True))
