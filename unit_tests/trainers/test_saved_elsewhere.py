"""Checkpoints from other machines: of a GPU, with classes of a library, with shards of several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from configs.trainer_schema import TrainerConfig
from core.errors import UserError
from trainers.checkpoint.copies import load_tensors, save_tensors
from trainers.checkpoint.fsdp2_state import read_state, read_weights, reading_shards, write_state
from trainers.checkpoint.saved_policy import read_policy
from trainers.checkpoint.state import RankState, load_state, read_rest, reading, save_state
from trainers.local import TorchLearner
from unit_tests.helpers.collectives import fake_group


def test_a_checkpoint_of_a_gpu_is_read_on_a_machine_without_one(tmp_path, monkeypatch):
    then, now = (TorchLearner(nn.Linear(3, 2).bfloat16(), TrainerConfig()) for _ in range(2))
    then.backward(then.model(torch.ones(1, 3).bfloat16()).sum())
    then.update(lr=0.5, apply=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        then.save_state(tmp_path / "policy")
        save_tensors(then.master, tmp_path / "copies", rank=0)
        torch.save({"random": torch.ones(3)}, tmp_path / "rank_0.pt")
    now.load_state(tmp_path / "policy")
    assert all(torch.equal(own, saved) for own, saved in zip(now.master, then.master, strict=True))
    assert all(torch.equal(own, saved) for own, saved in zip(now.parameters, then.parameters, strict=True))
    moments = [[state["exp_avg"] for state in learner.optimizer.state.values()] for learner in (now, then)]
    assert all(torch.equal(own, saved) and own.any() for own, saved in zip(*moments, strict=True))
    found = read_policy(tmp_path / "policy", ["weight", "bias"])
    assert [t.device.type for t in found.values()] == ["cpu"] * 2 and torch.equal(found["bias"], then.master[1])
    copies = [torch.zeros_like(t) for t in then.master]
    load_tensors(copies, tmp_path / "copies", rank=0)
    assert all(torch.equal(own, saved) for own, saved in zip(copies, then.master, strict=True))
    assert read_rest(tmp_path, 0)["random"].device.type == "cpu"


@pytest.mark.parametrize(("had", "has", "restored"), [(True, True, [[7]]), (True, False, []), (False, True, [])])
def test_the_random_state_of_a_gpu_is_restored_where_both_have_one(tmp_path, monkeypatch, had, has, restored):
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: given.append(state.tolist()))
    nothing: Any = {"learners": {}, "references": {}, "settings": {}, "updates_done": 1, "skipped_in_a_row": 0}
    state = RankState(rank=0, ranks=1, **nothing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: had)
    save_state(state, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has)
    assert load_state(state, tmp_path) == (1, 0) and given == restored


class Kept:
    """A class of a library, as DeepSpeed's files hold some."""


def test_a_class_is_read_where_the_reader_names_it(tmp_path):
    path = tmp_path / "rank_0.pt"
    torch.save({"kept": Kept()}, path)
    with reading(path, classes=[Kept]):
        assert type(torch.load(path)["kept"]) is Kept
    with pytest.raises(UserError, match=f"^resume: {path} is refused, "), reading(path):
        torch.load(path)
    with pytest.raises(UserError, match=rf"^resume: {path} cannot be read \(KeyError: 'storages'\): "), reading(path):
        raise KeyError("storages")


def test_a_parameter_that_zero_3_holds_elsewhere_fits_by_its_whole_shape():
    model = nn.Linear(3, 2, bias=False)
    model.weight.ds_shape = torch.Size([6, 9])  # type: ignore[attr-defined]
    learner: Any = SimpleNamespace(model=model)
    given: Any = {"rank": 0, "ranks": 1, "updates_done": 0, "skipped_in_a_row": 0, "references": {}}
    state = RankState(learners={"policy": learner}, settings={"a": 1}, **given)
    assert state.fits == {"a": 1, "model": {"policy.weight": [6, 9]}}


@pytest.mark.parametrize("error", [OSError, SafetensorError, ValueError, KeyError])
def test_shards_that_cannot_be_read_are_told_with_the_first_reason(tmp_path, error):
    says = rf"^resume: {tmp_path} cannot be read \('?cut'?\): the checkpoint is damaged, resume from an earlier one$"
    with pytest.raises(UserError, match=says), reading_shards(tmp_path):
        raise error("cut")
    with pytest.raises(UserError, match=says), reading_shards(tmp_path):
        raise CheckpointException("of all ranks", {3: (error("cut"), [])})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="ours"), reading_shards(tmp_path):
        raise TypeError("ours")


def test_every_rank_writes_files_of_its_own_that_one_process_reads(tmp_path):
    write_state({"weights.a": torch.arange(6.0).reshape(2, 3)}, tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    assert file.name.startswith("shard-00001-")
    with fake_group(1, 2):  # as where a second trainer of the process is a rank
        assert read_weights(tmp_path)["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(UserError, match=r"cannot be read \(.*weights\.b"):
        read_state({"weights.b": torch.zeros(1)}, tmp_path)
