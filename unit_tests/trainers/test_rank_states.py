"""Checkpoints of a rank, in exact numbers and sentences, without a trainer."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import DistNetworkError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from core.errors import UserError
from modeling.nf4 import Nf4Linear
from trainers import row_shards
from trainers.checkpoint.copies import load_tensors, save_tensors
from trainers.checkpoint.fsdp2_state import (
    from_saved,
    is_saved,
    list_saved,
    read_state,
    read_weights,
    to_saved,
    write_state,
)
from trainers.checkpoint.saved_policy import load_policy, read_policy
from trainers.checkpoint.state import RankState, check_fit, estimate_bytes, load_state, read_rest, reading, save_state
from trainers.row_shards import as_part_of, cut_rows, find_places, local_part, shard_rows, unite_rows


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.frozen = nn.Linear(3, 2, dtype=torch.bfloat16), nn.Linear(4, 5, bias=False)
        self.frozen.requires_grad_(False)


class Learner:
    """Learner whose state is a number in a file."""

    def __init__(self, notes: list[str], value: int = 0) -> None:
        self.model, self.notes, self.value = Model(), notes, value

    def save_state(self, folder: Path) -> None:
        folder.write_text(str(self.value))

    def load_state(self, folder: Path) -> None:
        self.value = int(folder.read_text())
        self.notes.append(f"load {folder.name}")


class Reference(Learner):
    def save_state(self, policy: Learner, folder: Path) -> None:  # type: ignore[override]
        folder.write_text(str(100 * policy.value + self.value))

    def load_state(self, policy: Learner, folder: Path) -> None:  # type: ignore[override]
        self.value = int(folder.read_text())
        self.notes.append(f"load {folder.name} after the policy's {policy.value}")


def state_of(notes: list[str], value: int, **more: Any) -> RankState:
    learners: Any = {"policy": Learner(notes, value), "critic": Learner(notes, value + 1)}
    given = {"rank": 0, "ranks": 1, "updates_done": 7, "skipped_in_a_row": 2, "settings": {"backend": "local", "n": 3}}
    return RankState(learners=learners, references={"r": Reference(notes, 5)}, **given | more)  # type: ignore[arg-type]


def test_a_rank_saves_every_part_and_finds_it_again(tmp_path):
    notes: list[str] = []
    then, now = state_of(notes, 3), state_of(notes, 0, updates_done=0, skipped_in_a_row=0)
    torch.manual_seed(1)
    save_state(then, tmp_path)
    want = torch.rand(2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["critic", "policy", "rank_0.pt", "teacher_r"]
    assert load_state(now, tmp_path) == (7, 2) and torch.equal(torch.rand(2), want)
    assert notes == ["load policy", "load critic", "load teacher_r after the policy's 3"]
    assert now.learners["critic"].value == 4 and now.references["r"].value == 305  # type: ignore[attr-defined]
    saved = read_rest(tmp_path, 0)
    shapes = {
        "policy.body.weight": [2, 3],
        "policy.body.bias": [2],
        "critic.body.weight": [2, 3],
        "critic.body.bias": [2],
    }
    assert saved["fits"] == {"backend": "local", "n": 3, "model": shapes} and saved["ranks"] == 1
    # the random state of rank 1 of 2 is that of rank 1, and of rank 4 that of rank 0
    torch.manual_seed(2)
    other = torch.get_rng_state()
    torch.save(saved | {"random": other, "updates_done": 8}, tmp_path / "rank_1.pt")
    torch.save(saved | {"ranks": 2}, tmp_path / "rank_0.pt")
    assert [load_state(state_of([], 0, rank=rank), tmp_path)[0] for rank in (0, 1, 2, 3, 4)] == [7, 8, 7, 8, 7]
    load_state(state_of([], 0, rank=3), tmp_path)
    assert torch.equal(torch.get_rng_state(), other)


MADE = {"a": 1, "b": 2, "model": {"x": [1], "y": [2]}}


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (MADE, None),
        ({"a": 1, "model": MADE["model"]}, None),  # of a run whose files b does not decide
        (
            MADE | {"a": 5, "b": 6},
            "a is 5 and the checkpoint here was made with 1, whose files fit no other: set a=1",
        ),
        (MADE | {"b": 6}, "b is 6 and the checkpoint here was made with 2, whose files fit no other: set b=2"),
        *(
            (
                MADE | {"model": model},
                f"model: the checkpoint here does not hold what this run trains, {n} tensors differ, such as {name}: "
                "resume with the model of the run that made it",
            )
            for model, n, name in (
                ({"x": [1]}, 1, "y"),
                ({"x": [1], "y": [2], "c": [3]}, 1, "c"),
                ({"x": [2], "y": [3]}, 2, "x"),
            )
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_names_the_first_difference(now, says):
    if says is None:
        check_fit(MADE, now, Path("here"))
        return
    with pytest.raises(UserError) as raised:
        check_fit(MADE, now, Path("here"))
    assert str(raised.value) == says


def test_the_bytes_of_a_checkpoint_and_of_a_model_are_estimated():
    whole: Any = SimpleNamespace(model=Model())  # 8 trained numbers in bfloat16, 20 frozen in float32
    assert estimate_bytes([whole]) == 8 * 2 + 20 * 4
    assert estimate_bytes([whole, whole], has_optimizer=True) == 2 * (8 * (2 + 12) + 20 * 4)
    assert estimate_bytes([whole], ranks=5) == 96 // 5
    partitioned: Any = SimpleNamespace(model=nn.Linear(2, 2, bias=False))
    partitioned.model.weight.ds_numel = 10
    assert estimate_bytes([partitioned], has_optimizer=True) == 10 * 16
    four: Any = SimpleNamespace(model=nn.Sequential(nn.Linear(2, 2, bias=False)))
    layer = Nf4Linear.__new__(Nf4Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features, layer.dtype = 6, 10, torch.bfloat16
    four.model.append(layer)
    assert estimate_bytes([four]) == 4 * 4 + 6 * 10 * 2 and estimate_bytes([four], has_optimizer=True) == 4 * 16


def test_a_file_of_a_checkpoint_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "rank_3.pt"
    with pytest.raises(UserError) as raised:
        read_rest(tmp_path, 3)
    assert str(raised.value) == (
        f"resume: trainer rank 3 does not see {path}: a checkpoint must lie where every machine of the run reads it"
    )
    for error in (OSError, EOFError, RuntimeError, ValueError):
        with pytest.raises(UserError) as raised, reading(path):
            raise error("a\nb")
        assert str(raised.value) == (
            f"resume: {path} cannot be read ({error.__name__}: a): the checkpoint is damaged, resume from an earlier "
            "one"
        )
    for error in (DistNetworkError("another rank"), RuntimeError("gloo failed"), TypeError("ours")):
        with pytest.raises(type(error), match=str(error)), reading(path):
            raise error
    torch.save({"path": tmp_path}, path)
    with pytest.raises(UserError) as raised:
        read_rest(tmp_path, 3)
    assert str(raised.value).startswith(
        f"resume: {path} is refused, because it is damaged or holds what a checkpoint of a run never holds, such as "
        "code ("
    )
    assert str(raised.value).endswith("): resume from a checkpoint that a run of this project wrote")


def test_code_is_refused_whatever_the_environment_says_and_it_is_as_before(tmp_path, monkeypatch):
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    for before in ((None, "1"), ("0", None), (None, None)):
        for name, value in zip(names, before, strict=True):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        with reading(tmp_path):
            assert tuple(map(os.environ.get, names)) == ("1", None)
        assert tuple(map(os.environ.get, names)) == before


def test_copies_of_weights_are_read_in_place_or_refused(tmp_path):
    folder = tmp_path / "copies"
    save_tensors([torch.ones(2), torch.full((2, 3), 2.0)], folder, rank=1)
    save_tensors([torch.zeros(2)], folder, rank=0)  # the folder is there
    found = [torch.zeros(2), torch.zeros(2, 3)]
    load_tensors(found, folder, rank=1)
    assert found[0].tolist() == [1, 1] and found[1].tolist() == [[2] * 3] * 2
    for other in ([torch.zeros(2)], [torch.zeros(2), torch.zeros(3, 2)]):
        with pytest.raises(UserError) as raised:
            load_tensors(other, folder, rank=1)
        assert str(raised.value) == (
            f"resume: {folder} holds other weights than the policy's: resume with the model of that run"
        )


def test_a_policy_is_read_from_the_files_of_one_process_or_of_shards(tmp_path):
    model, saved = Model(), {"body.weight": torch.full((2, 3), 2.0), "body.bias": torch.ones(2)}
    (tmp_path / "local" / "policy").mkdir(parents=True)
    torch.save({"weights": [*saved.values()]}, tmp_path / "local" / "policy" / "state.pt")
    write_state(
        {f"weights.{name}": t for name, t in saved.items()} | {"exp_avg.x": torch.ones(1)},
        tmp_path / "shards" / "policy",
    )
    for name in ("local", "shards"):
        for p in model.body.parameters():
            p.data.zero_()
        load_policy(model, tmp_path / name)
        assert model.body.weight.tolist() == [[2] * 3] * 2 and model.body.bias.tolist() == [1, 1]
        assert read_policy(tmp_path / name / "policy", ["body.weight", "body.bias"]).keys() == saved.keys()
    model.frozen.requires_grad_(True)
    for name in ("local", "shards"):
        with pytest.raises(UserError) as raised:
            load_policy(model, tmp_path / name)
        says = f"the checkpoint {tmp_path / name} does not hold frozen.weight of the run's model"
        assert str(raised.value) == says
    model.frozen.requires_grad_(False)
    model.body = nn.Linear(2, 3)
    with pytest.raises(UserError, match=r"does not hold body.weight of the run's model$"):
        load_policy(model, tmp_path / "local")


# FSDP2 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "returns"),
    [
        *((1, True), (1.5, True), (None, True), (True, False), ([1], False), ("a", False)),
        *((torch.ones(2, dtype=torch.int64), True), (torch.ones(2, dtype=torch.float64), True)),
        *((torch.tensor(1), False), (torch.tensor(1.0, dtype=torch.float64), False), (torch.tensor(1.0), True)),
    ],
)
def test_a_state_is_saved_where_it_comes_back_in_its_type(value, returns):
    assert is_saved(value) is returns
    if returns and value is not None:
        parameter = torch.zeros(2)
        back = from_saved(to_saved(parameter, parameter, value))
        assert type(back) is type(value) and (torch.equal(back, value) if isinstance(value, Tensor) else back == value)


def test_a_state_of_its_own_shape_is_copied_and_a_parameters_is_not():
    held, table, scalar = torch.zeros(4), torch.ones(3), torch.tensor(2.0)
    assert to_saved(held, held, moment := torch.ones(4)) is moment
    for own in (table, scalar):
        assert to_saved(held, held, own) is not own and torch.equal(to_saved(held, held, own), own)
    assert (to_saved(held, held, 3).dtype, to_saved(held, held, 3.0).dtype) == (torch.int64, torch.float64)


def test_files_of_shards_are_listed_and_read_or_named(tmp_path):
    state = {"weights.a": torch.arange(6.0).reshape(2, 3), "step.a": torch.tensor(3)}
    write_state(state, tmp_path)
    listed = list_saved(tmp_path)
    assert {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in listed.items()} == {
        "weights.a": ((2, 3), torch.float32, "meta"),
        "step.a": ((), torch.int64, "meta"),
    }
    found = {"weights.a": torch.zeros(2, 3), "step.a": torch.tensor(0)}
    read_state(found, tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert read_weights(tmp_path).keys() == {"a"} and torch.equal(read_weights(tmp_path)["a"], state["weights.a"])
    says = rf"^resume: {tmp_path} cannot be read \(.+\): the checkpoint is damaged, resume from an earlier one$"
    with pytest.raises(UserError, match=says):
        read_state({"weights.b": torch.zeros(1)}, tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4])
    for call in (lambda: list_saved(tmp_path), lambda: read_weights(tmp_path), lambda: read_state(found, tmp_path)):
        with pytest.raises(UserError, match=says):
            call()


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_rows_are_sharded_and_united_with_their_ties(mesh):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 3), nn.Linear(2, 3, bias=False)
            self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

        def tie_weights(self) -> None:
            self.last.weight = self.first.weight

    model, taken = Tied(), list[Any]()
    assert not unite_rows(model, taken.append, device=torch.device("cpu"), dtype=torch.float32) and not taken
    want = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    shard_rows(model, mesh)
    places = find_places(model)
    assert [[name for _, name in at] for _, at in places] == [["scale"], ["weight", "weight"], ["bias"]]
    assert places[1][1] == [(model.first, "weight"), (model.last, "weight")]
    kinds = {name: (p.placements[0], p.requires_grad) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert kinds == {"scale": (Replicate(), False), "first.weight": (Shard(0), True), "first.bias": (Shard(0), True)}
    rows = model.first.weight
    assert type(local_part(rows)) is Tensor and torch.equal(local_part(rows), want["first.weight"])
    held, other = torch.ones(3, 2), torch.zeros(3, 2)
    part = as_part_of(rows, held)
    assert (
        isinstance(part, DTensor)
        and part.placements == rows.placements
        and local_part(part).data_ptr() == held.data_ptr()
    )
    assert as_part_of(other, held) is held and local_part(held) is held
    assert cut_rows(held, other) is other
    assert type(cut_rows(rows, held)) is Tensor and torch.equal(cut_rows(rows, held), held)
    assert unite_rows(model, taken.append, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert [id(p) for p in taken] == [id(p) for p in (model.scale, model.first.weight, model.first.bias)]
    assert (
        model.first.weight is model.last.weight and model.first.weight.requires_grad and not model.scale.requires_grad
    )
    for name, p in model.named_parameters():
        assert not isinstance(p, DTensor) and torch.equal(p, want[name].bfloat16())


def test_a_shard_is_freed_before_the_memory_is_returned(mesh, monkeypatch):
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model.tie_weights = lambda: None
    shard_rows(model, mesh)
    shards, left = [weakref.ref(p) for p in model.parameters()], list[int]()
    monkeypatch.setattr(
        row_shards, "return_freed_memory", lambda: left.append(sum(shard() is not None for shard in shards))
    )
    assert unite_rows(model, lambda whole: None, device=torch.device("cpu"), dtype=torch.float32)
    assert left == [3, 2, 1, 0]
