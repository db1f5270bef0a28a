"""Exported weights under the names of files: groups of tensors, converted together, in bounded buckets."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from modeling.export import export_parameter
from modeling.file_names import ExportedGroup, WeightExport, cut_buckets, plan_files

NAMED = {"gate": torch.ones(2, 3), "norm": torch.full((5,), 2.0), "up": torch.full((4, 3), 3.0)}
EXPORTED = [export_parameter(name, tensor) for name, tensor in NAMED.items()]


def join_two(tensors):
    """As of a family whose files hold gate and up in one tensor, and the norm under another name."""
    made = {"ln": tensors["norm"]} if "norm" in tensors else {}
    parts = [tensors[name] for name in ("gate", "up") if name in tensors]
    return made | ({"gate_up": torch.cat(parts)} if parts else {})


def cut_three(tensors):
    return {f"{name}.{i}": part for name, tensor in tensors.items() for i, part in enumerate(tensor.unbind(0))}


def need_all(tensors):
    """A conversion that changes with what else is there."""
    return {f"{name}{len(tensors)}": tensor for name, tensor in tensors.items()}


def test_tensors_that_are_joined_are_converted_together():
    groups = plan_files(EXPORTED, join_two)
    assert [[t.name for t in group.tensors] for group in groups] == [["gate", "up"], ["norm"]]
    found = dict(pair for group in groups for pair in group.compute(lambda t: t.compute()))
    assert found.keys() == {"gate_up", "ln"} and torch.equal(found["gate_up"], torch.cat([NAMED["gate"], NAMED["up"]]))


def test_a_conversion_that_needs_everything_gets_everything():
    [group] = plan_files(EXPORTED, need_all)
    assert {name for name, _ in group.compute(lambda t: t.compute())} == {"gate3", "norm3", "up3"}


def test_a_model_whose_names_are_those_of_its_files_is_not_converted():
    groups = plan_files(EXPORTED, lambda tensors: dict(reversed(tensors.items())))
    assert [group.convert for group in groups] == [None] * 3
    assert [[t.name for t in group.tensors] for group in groups] == [["gate"], ["norm"], ["up"]]


@pytest.mark.parametrize("max_bytes", [1, 24, 50, 10_000])
def test_a_large_group_fills_several_buckets(max_bytes):
    groups = plan_files(EXPORTED, cut_three)
    buckets = [*cut_buckets(groups, max_bytes)]
    assert [name for bucket in buckets for name, _ in bucket] == [
        f"{n}.{i}" for n, t in NAMED.items() for i in range(len(t))
    ]
    assert all(len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= max_bytes for bucket in buckets)


def test_a_turned_tensor_is_sent_in_the_order_of_its_new_rows():
    """A receiver reads memory from its start, and safetensors refuses a view."""
    [group] = plan_files(EXPORTED[:1], lambda tensors: {f"{name}.turned": t.mT for name, t in tensors.items()})
    [(name, tensor)] = group.compute(lambda t: t.compute())
    assert name == "gate.turned" and tensor.shape == (3, 2) and tensor.is_contiguous()


def test_a_bucket_is_filled_by_bytes():
    model = nn.Linear(4, 4)  # 64 bytes and 16
    model.config = SimpleNamespace()
    names = [[group.tensors[0].name for group in groups] for groups in WeightExport(model).split("whole", 79)]
    assert names == [["weight"], ["bias"]]


def test_saved_buffers_are_exported_and_others_are_not():
    model = nn.BatchNorm1d(3)
    model.register_buffer("rope", torch.ones(2), persistent=False)
    model.config = SimpleNamespace()
    assert [t.name for t in WeightExport(model).tensors["whole"]] == [
        *("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]
    assert isinstance(next(iter(WeightExport(model).split("whole", 1)))[0], ExportedGroup)
