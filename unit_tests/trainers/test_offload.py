"""Offloading of a rank: what may be used meanwhile, in exact sentences, and storages that are emptied and filled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from core.errors import RunStopped
from core.timing.clock import ActivityTimer
from core.timing.phases import TRAINER_ACTIVITIES
from trainers.offload.offloaded_trainer import OffloadedTrainer, list_weights, release_gathered
from trainers.offload.storages import HostBlocks, OffloadedStorages, find_storages


def trainer_of(**more: Any) -> Any:
    policy = SimpleNamespace(model=nn.Linear(4, 3), module=None, export_weights=lambda: "sent", master=[torch.ones(5)])
    made = SimpleNamespace(
        **{"rank": 2, "device": "cpu", "timer": ActivityTimer(*TRAINER_ACTIVITIES), "policy": policy, "critic": None},
        **{"frozen": {"ref_logp": nn.Linear(2, 2)}, "references": {}},
    )
    vars(made).update(more)
    return made


def test_an_offloaded_trainer_allows_what_its_state_allows():
    trainer = trainer_of(critic=SimpleNamespace(model=nn.Linear(1, 1)))
    policy, critic, away = trainer.policy, trainer.critic, OffloadedTrainer(trainer)

    def refused(call: Any) -> str:
        with pytest.raises(RunStopped) as raised:
            call()
        return str(raised.value)

    use = "trainer 2 was to use {} of a model while it was away from its device: the driver lets it return first "
    use += "(driver/rl/colocation.py)"
    assert refused(away.offload_weights) == "trainer 2: offload_weights() was called while nothing of it was away"
    assert refused(away.reload_states) == "trainer 2: reload_states() was called while nothing of it was away"
    assert away.offload_states() == 4 * (5 + 4 + 2 + 1 + 1), "all but the weights of the policy"
    assert trainer.policy.model is policy.model and trainer.policy.export_weights() == "sent"
    assert trainer.policy.module is None and trainer.critic.model is critic.model
    assert refused(lambda: trainer.policy.master) == use.format("master")
    assert refused(lambda: trainer.critic.module) == use.format("module")
    assert refused(lambda: trainer.frozen["ref_logp"].forward) == use.format("forward")
    assert refused(away.offload_states) == "trainer 2: offload_states() was called while states of it was away"
    assert refused(away.reload_states) == "trainer 2: reload_states() was called while states of it was away"
    assert away.offload_weights() == 4 * (12 + 3)
    assert trainer.policy.model is policy.model
    assert refused(lambda: trainer.policy.export_weights) == use.format("export_weights")
    said = "trainer 2: offload_states() was called while states and weights of it was away"
    assert refused(away.offload_states) == said
    away.reload_states()
    assert trainer.policy is policy and trainer.critic is critic and policy.master[0].tolist() == [1] * 5
    assert away.left == [] and away.offload_states() > 0
    assert all(trainer.timer.read_seconds()[name] > 0 for name in ("offload", "reload"))


def test_gathered_units_are_released_and_a_policys_weights_listed():
    released: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    model[0].reshard = lambda: released.append("unit")  # type: ignore[assignment]
    learner: Any = SimpleNamespace(model=model)
    release_gathered(learner, None)
    assert released == ["unit"]
    model[0].weight.ds_tensor = shard = torch.ones(1)  # type: ignore[attr-defined]
    found = [*list_weights(learner)]
    assert len(found) == 2 + 3 and found[1] is shard and torch.equal(found[0], model[0].weight.data)


class Other:
    kept = torch.ones(2)

    def __init__(self) -> None:
        self.own = torch.ones(3)

    def hook(self) -> None: ...


def test_only_what_an_object_holds_itself_is_offloaded():
    """A hook of another object is code: from it, that object would be emptied too, and it may be in use."""
    other, held = Other(), torch.ones(5)
    for end in (Other, other.hook, other.own.add_, [other.own].append, lambda: other.own, torch.nn, len):
        assert find_storages({"held": [held], "end": end}, device="cpu") == [held.untyped_storage()], end
    assert [s.nbytes() for s in find_storages(other, device="cpu")] == [12]
    assert find_storages(held, device="meta") == []


def test_storages_are_emptied_and_filled_again_or_only_made_again():
    tensors = [torch.arange(5.0), torch.arange(7, dtype=torch.int16), torch.empty(0)]
    storages = find_storages(tensors, device="cpu")
    assert sorted(s.nbytes() for s in storages) == [14, 20]
    aside = OffloadedStorages()
    assert aside.put(storages) == 34 and [s.nbytes() for s in storages] == [0, 0]
    aside.bring_back()
    assert tensors[0].tolist() == [*range(5)] and tensors[1].tolist() == [*range(7)]
    tensors[0][0] = 9
    aside.bring_back()  # nothing is aside
    assert tensors[0].tolist() == [9, *range(1, 5)]
    assert aside.put(storages, keep=False) == 34
    aside.bring_back()
    assert sorted(s.nbytes() for s in storages) == [14, 20]
    host = HostBlocks(5, pinned=False)
    pieces = [host.copy(torch.tensor(values, dtype=torch.uint8)) for values in ([1, 2, 3], [4, 5])]
    assert [[p.tolist() for p in one] for one in pieces] == [[[1, 2, 3]], [[4, 5]]]


def test_memory_of_another_owner_stays_where_it_is():
    """torch cannot resize it, and so not free it."""
    owned = torch.from_numpy(np.ones(3))
    assert find_storages([owned, held := torch.ones(2)], device="cpu") == [held.untyped_storage()]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_other_processes_get_the_memory_of_a_gpu(monkeypatch, has_gpu):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    assert OffloadedStorages().put(find_storages(torch.ones(2), device="cpu")) == 8
    assert calls == (["ipc_collect", "empty_cache"] if has_gpu else [])


def test_a_rank_names_the_gpus_that_it_was_given(monkeypatch):
    away = OffloadedTrainer(trainer_of())
    for given, name in (("2,3", "2,3"), (None, "")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert away.name_devices() == name
