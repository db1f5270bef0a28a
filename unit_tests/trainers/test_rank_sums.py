"""What ranks of a distributed trainer share: groups, sums, rows of matrices, and the end of a save."""

from __future__ import annotations

import sys
from collections.abc import Generator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from algs.sft import SFT
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import UserError
from core.patches import read_attention
from modeling.attention import BY_SEQUENCE
from modeling.layout_probe import LayoutProbe
from modeling.sequence_parallel import SequenceGroup
from trainers import distributed as of_ranks
from trainers.deepspeed import DeepSpeedLearner
from trainers.distributed import DistributedTrainer, form_sequence_group
from trainers.fsdp2 import FsdpTrainer, MatrixParts
from trainers.row_shards import cut_rows, local_part, shard_rows
from unit_tests.helpers.collectives import Recording, fake_group
from unit_tests.helpers.models import random_model
from unit_tests.helpers.pretend_cuda import needs_pretend_cuda


def rank_of(**more: Any) -> Any:
    made: Any = DistributedTrainer.__new__(DistributedTrainer)
    vars(made).update({"device": "cpu"} | more)
    return made


@pytest.mark.parametrize(
    ("rank", "size", "place", "own"),
    [(0, 1, 0, [0]), (3, 2, 1, [2, 3]), (6, 4, 2, [4, 5, 6, 7]), (7, 8, 7, [*range(8)])],
)
def test_a_sequence_group_is_of_ranks_that_follow_each_other(rank, size, place, own):
    with fake_group(rank, 8):
        found = form_sequence_group(size)
        assert (found.place, found.size) == (place, size)
        assert distributed.get_process_group_ranks(found.group) == own


def test_sums_and_maxima_are_over_all_ranks_and_rows_count_once(monkeypatch):
    """The other rank has 5 and 0."""
    other = torch.tensor([5, 0])

    def all_reduce(tensor: Tensor, op: Any = distributed.ReduceOp.SUM) -> None:
        tensor.copy_(torch.maximum(tensor, other) if op == distributed.ReduceOp.MAX else tensor + other)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    rank, own = rank_of(), torch.tensor([1, 2])
    assert rank.find_largest(own).tolist() == [5, 2] and own.tolist() == [1, 2]
    assert rank.sum_over_ranks(own.clone()).tolist() == [6, 2]
    assert rank.sum_over_rows(own.clone()).tolist() == [6, 2]
    for place, total in ((0, [6, 2]), (1, [5, 0])):
        rank.sequence_group = SequenceGroup(place=place, size=2, group=None)
        assert rank.sum_over_rows(own.clone()).tolist() == total, "the ranks of a group have the same rows"


class Exporting:
    model = "a model"

    def export_weights(self, max_bytes: int, scope: str) -> Generator[Any]:
        yield [(f"{scope}.weight", torch.ones(2))]


@pytest.mark.parametrize("is_full", [False, True])
def test_ranks_leave_a_save_together_though_the_disk_is_full(monkeypatch, tmp_path, is_full):
    waits: list[str] = []
    written: list[Any] = []

    def save(model: Any, folder: Any, exported: Any) -> list[str]:
        written.append((model, folder, {scope: [*named] for scope, named in exported.items()}))
        if is_full:
            raise OSError("no space")
        return ["corrected"]

    monkeypatch.setattr(torch.distributed, "barrier", lambda: waits.append("waited"))
    monkeypatch.setattr(of_ranks, "save_exported", save)
    if is_full:
        with pytest.raises(OSError, match="no space"):
            rank_of(rank=0).write_model(Exporting(), tmp_path, ["whole", "adapter"])
    else:
        assert rank_of(rank=0).write_model(Exporting(), tmp_path, ["whole", "adapter"]) == ["corrected"]
    assert written == [("a model", tmp_path, {"whole": ["whole.weight"], "adapter": ["adapter.weight"]})]
    assert rank_of(rank=1).write_model(Exporting(), tmp_path, ["whole"]) == [] and len(written) == 1
    assert waits == ["waited"] * 2


def probed(level: Any, *, by_path: str = "", **config: Any) -> Any:
    """Return a model whose probe has found this."""
    model: Any = random_model("llama", BY_SEQUENCE, **config)
    attention = read_attention(model.config)
    model.layout_probe = LayoutProbe(level=level, attention=attention, error=0.0, bound=0.0, by_path=by_path)
    return model


UNSHARED = "this llama model computes no packed rows with shared prefixes"


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [
        (("shared", {}), {}, None),
        (("packed", {}), {}, UNSHARED),
        (("padded", {}), {}, UNSHARED),
        (("shared", {}), {"layout": "padded"}, UNSHARED),
        (
            ("shared", {"by_path": "2 x Mixer"}),
            {},
            "a rank has a part of every row, and 2 x Mixer read whole sequences",
        ),
        (
            ("padded", {"num_attention_heads": 1}),
            {},
            "the model has 1 heads of queries and 1 of keys and values, and its ranks share them: take a number that "
            "divides both, or divides the first and is a multiple of the second",
        ),
    ],
)
def test_a_model_whose_rows_ranks_cannot_share_is_refused(model, settings, why):
    level, more = model
    models = [probed("shared"), probed(level, **more)]  # a teacher's may be the one that cannot
    rank = rank_of(cfg=TrainerConfig(**settings), list_models=lambda: models)
    if why is None:
        rank.check_models(2)
        return
    with pytest.raises(UserError) as raised:
        rank.check_models(2)
    assert str(raised.value) == f"trainer.sequence_parallel=2: {why}"


def test_a_rank_has_its_rows_of_a_matrix_and_whole_experts():
    """The second of two ranks has the last two of four rows; nothing is sent to cut them."""
    whole, experts = torch.arange(12.0).reshape(4, 3), nn.Parameter(torch.ones(2, 4, 3))
    with fake_group(1, 2), Recording() as recording:
        mesh = init_device_mesh("cpu", (2,))
        recording.seen.clear()
        rows = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        held, own = local_part(rows.detach()), experts.detach()
        parts = MatrixParts({held: rows, own: experts})
        assert parts.cut(held, 10 * whole).tolist() == (10 * whole)[2:].tolist()
        assert parts.cut(own, experts) is experts and parts.gather(own, experts) is experts
        assert cut_rows(rows, whole).tolist() == whole[2:].tolist() and cut_rows(whole, own) is own
        assert recording.seen == []
        assert parts.gather(held, held).shape == whole.shape
        assert [(call.name, call.ranks) for call in recording.seen] == [("all_gather_into_tensor", (0, 1))]


def test_a_model_is_sharded_by_rows_without_a_word_to_other_ranks():
    model: Any = nn.Linear(3, 4)
    model.scale, model.tie_weights = nn.Parameter(torch.tensor(2.0)), lambda: None
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    with fake_group(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        with Recording() as recording:
            shard_rows(model, mesh)
        assert recording.seen == []
        for name, p in model.named_parameters():
            assert p.shape == want[name].shape, name
            assert torch.equal(local_part(p), want[name][2:] if p.ndim else want[name]), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_place_and_the_deadline_of_the_run(tiny_path, monkeypatch, rank):
    notes: list[Any] = []

    class Rank(FsdpTrainer):
        def start_library(self, timeout: timedelta) -> None:
            notes.append(("library", timeout))
            super().start_library(timeout)

        def check_models(self, size: int) -> None:
            notes.append(("models", size))

    model = ModelConfig(path=tiny_path, dtype="float32", attention="sdpa")
    made: Any = None
    with fake_group(rank, 2), monkeypatch.context() as patch:
        patch.setattr(of_ranks, "form_group", lambda *asked: notes.append(("group", *asked)))
        patch.setattr(of_ranks, "set_group_timeouts", lambda timeout: notes.append(("every group", timeout)))
        for size in (1, 2):
            cfg = TrainerConfig(strategy="fsdp2", ranks=2, sequence_parallel=size)
            made = Rank(model, cfg, SFT(), timeout_s=7.0, temperature=1.0, total_updates=1)
            assert (made.rank, made.ranks) == (rank, 2) and (made.sequence_group is None) is (size == 1)
    deadline = timedelta(seconds=7)
    begun = [("group", "nccl" if torch.cuda.is_available() else "gloo", deadline), ("library", deadline)]
    assert notes == [*begun, ("every group", deadline), *begun, ("models", 2), ("every group", deadline)]
    assert (made.sequence_group.place, made.sequence_group.size) == (rank, 2)
    source = made.weight_source
    assert source.trainer is made and source.timer is made.timer and source.is_sender is (rank == 0)


@needs_pretend_cuda
def test_gradients_in_deepspeed_are_judged_on_their_device(monkeypatch, cuda_device):
    def initialize(*, model: Any, optimizer: Any, config: Any) -> tuple[Any, ...]:
        return SimpleNamespace(device=torch.device("cuda")), optimizer, None, None

    library: Any = SimpleNamespace(initialize=initialize)
    monkeypatch.setitem(sys.modules, "deepspeed", library)
    model = nn.Linear(2, 1).cuda()
    with fake_group(0, 1):
        learner = DeepSpeedLearner(model, TrainerConfig(zero_stage=0), "float32", lambda values: values)
    for value, finite in ((1.0, True), (torch.inf, False), (1.0, True)):
        cuda_device.clear()
        model(torch.full((1, 2), value, device="cuda")).sum().backward()
        assert cuda_device.syncs.total() == 0
        assert learner.has_finite_gradients() == finite
