"""Exported weights under the names of model files, as disks and vLLM have them.

transformers 5 holds some weights under other names and in other shapes than files do: all experts of a layer are a
single tensor in memory, and a tensor each in the files. Saving reverts that with `revert_weight_conversion`, for a
whole model at once. Here the same function is applied to groups of tensors, so that a sync needs memory for a group
at a time. A plan on meta tensors finds the groups: tensors that are joined on saving are in the same group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from core.types.weights import Bucket, ExportScope, split_into_buckets
from modeling.export import ExportedTensor, exported_tensors

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedGroup:
    """Tensors that are exported together."""

    tensors: Sequence[ExportedTensor]
    convert: Convert | None = None
    """Function that makes the tensors of files of them; None: they are the same."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> list[Tensor]:
        return [p for tensor in self.tensors for p in tensor.parameters]

    def compute(self, read: Callable[[ExportedTensor], Tensor]) -> Bucket:
        """Return named tensors, contiguous, possibly the parameters' own memory. read: computes one of `tensors`."""
        whole = {tensor.name: read(tensor) for tensor in self.tensors}
        named = whole if self.convert is None else self.convert(whole)
        return [(name, tensor.contiguous()) for name, tensor in named.items()]


class WeightExport:
    """Export of a model's weights, in groups by scope, cut into buckets."""

    def __init__(self, model: nn.Module, tensors: dict[ExportScope, list[ExportedTensor]] | None = None) -> None:
        """tensors: those of the scopes whole and adapter; None: `exported_tensors` of the model."""
        self.model, self.tensors = model, exported_tensors(model) if tensors is None else tensors

    @cached_property
    def _files(self) -> list[ExportedGroup]:
        peft: Any = self.model
        base = peft.get_base_model() if hasattr(peft, "peft_config") else self.model
        return plan_files(self.tensors["whole"], partial(to_file_names, base))

    def split(self, scope: ExportScope, max_bytes: int) -> Iterator[list[ExportedGroup]]:
        """Yield lists of groups of at most `max_bytes`; a larger group is alone."""
        groups = self._files if scope == "files" else [ExportedGroup(tensors=[t]) for t in self.tensors[scope]]
        return split_into_buckets(groups, lambda group: group.nbytes, max_bytes)


def cut_buckets(
    groups: Sequence[ExportedGroup], max_bytes: int, read: Callable[[ExportedTensor], Tensor] = ExportedTensor.compute
) -> Iterator[Bucket]:
    """Yield the tensors of groups in buckets of at most `max_bytes`. A large group fills several."""
    named = [pair for group in groups for pair in group.compute(read)]
    return split_into_buckets(named, lambda pair: pair[1].nbytes, max_bytes)


def plan_files(tensors: Sequence[ExportedTensor], convert: Convert) -> list[ExportedGroup]:
    """Return the groups of tensors that are converted together, in the order of their first tensor.

    convert: makes the tensors of files of any part of a model's. If it needs other groups than those found here, the
    whole model is one group.
    """
    meta = {t.name: torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors}
    made = convert(meta)
    if _describe(made) == _describe(meta):
        return [ExportedGroup(tensors=[t]) for t in tensors]
    by_name = {t.name: t for t in tensors}
    outputs = {name: {*convert({name: value})} for name, value in meta.items()}
    groups: list[ExportedGroup] = []
    found: dict[str, Tensor] = {}
    for names in _join(outputs):
        part = {name: meta[name] for name in names}
        converted = convert(part)
        found |= converted
        same = _describe(converted) == _describe(part)
        groups.append(ExportedGroup(tensors=[by_name[n] for n in names], convert=None if same else convert))
    if _describe(found) != _describe(made):
        return [ExportedGroup(tensors=[*tensors], convert=convert)]
    return groups


def to_file_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model under the names, and in the shapes, that files have; some are views."""
    from transformers.core_model_loading import revert_weight_conversion

    own: Any = model
    return revert_weight_conversion(own, tensors)


def _describe(named: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in named.items()}


def _join(outputs: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the names in groups: those whose outputs have a name in common are together.

    >>> _join({"a": {"x"}, "b": {"y", "z"}, "c": {"x"}})
    [['a', 'c'], ['b']]
    """
    group_of: dict[str, list[str]] = {}
    groups: list[list[str]] = []
    for name, made in outputs.items():
        joined = [group for group in groups if any(group_of.get(output) is group for output in made)]
        group = [member for other in joined for member in other] + [name]
        groups = [other for other in groups if other not in joined]
        groups.append(group)
        group_of |= {output: group for member in group for output in outputs[member]}
    order = {name: number for number, name in enumerate(outputs)}
    return sorted(groups, key=lambda group: order[group[0]])
