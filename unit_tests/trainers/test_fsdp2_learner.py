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
    ids = torch.arange(12).reshape(2, 6)
    cfg = TrainerConfig(optimizer="sgd", max_grad_norm=0.25)
    plain = TorchLearner(random_model("llama"), cfg)
    ours = FsdpLearner(random_model("llama"), cfg, mesh, dtype=torch.float32, sum_over_ranks=lambda values: values)
    norms: list[tuple[float, float]] = []
    for scale in (1.0, 100.0, float("inf"), 1.0):
        for learner in (plain, ours):
            for _ in range(2):
                learner.backward(learner.model(ids).logits.square().mean() * scale)
        finite = plain.has_finite_gradients(), ours.has_finite_gradients()
        assert finite == (scale != float("inf"),) * 2
        norms.append((plain.update(lr=0.5, apply=finite[0]), ours.update(lr=0.5, apply=finite[1])))
        assert all(p.grad is None for p in (*plain.master, *ours.trained.values(), *ours.held.values()))
    assert ours.has_finite_gradients(), "there are none"
    ours.sum_over_ranks = lambda values: values + 1
    assert not ours.has_finite_gradients(), "another rank has one"
    assert [one for one, _ in norms] == pytest.approx([other for _, other in norms], rel=1e-4)
    assert norms[2] == (float("inf"),) * 2 and norms[0][0] > 0.25
    exported = {name: t for bucket in ours.export_weights(1000) for name, t in bucket}
    for bucket in plain.export_weights(10**9):
        for name, tensor in bucket:
            torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=1e-6)
    assert [*ours.held] == [*ours.trained] and len(ours.list_masters()) == len(ours.held)
    copies = [torch.full_like(held, n) for n, held in enumerate(ours.list_masters())]
    ours.save_copies(copies, tmp_path)
    found = [torch.zeros_like(held) for held in copies]
    ours.load_copies(found, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(copies, found, strict=True))
