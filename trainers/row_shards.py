"""Row-sharded DTensors, made before a model is filled from files.

empty model -- shard_rows --> every rank reads its rows -- unite_rows --> whole tensors, one at a time, for a library
that cuts them its own way
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from core.allocator import return_freed_memory
from core.patches import make_shard_of


def as_part_of(parameter: Tensor, held: Tensor) -> Tensor:
    """Return a DTensor with the local shard `held` and the placement of `parameter`; it shares the memory of `held`."""
    return make_shard_of(parameter, held) if isinstance(parameter, DTensor) else held


def local_part(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_rows(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return the local shard of a tensor that every rank has, with the placement of `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    return local_part(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


def shard_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters of an empty model in place over the ranks of `mesh`, by rows."""
    hf: Any = model
    hf.tie_weights()
    for p, places in find_places(model):
        cut = Shard(0) if p.ndim else Replicate()
        rows = nn.Parameter(distribute_tensor(p.detach(), mesh, [cut], src_data_rank=None), p.requires_grad)
        put(rows, places)


@torch.no_grad()
def unite_rows(
    model: nn.Module, take: Callable[[nn.Parameter], None], *, device: torch.device, dtype: torch.dtype
) -> bool:
    """Replace the sharded parameters of a filled model by full tensors in `dtype` on `device`.

    take: called with each full parameter, before the next is gathered; it keeps the part of this rank. Return False if
    the model has no sharded parameters.
    """
    # a queue that drops each entry, so that the shards of a parameter are freed before the next is gathered
    waiting = deque((p, places) for p, places in find_places(model) if isinstance(p, DTensor))
    found = bool(waiting)
    while waiting:
        sharded, places = waiting.popleft()
        rows: Any = as_part_of(sharded, local_part(sharded).to(device=device, dtype=dtype))
        whole = nn.Parameter(rows.full_tensor(), sharded.requires_grad)
        put(whole, places)
        take(whole)
        del sharded, rows
        return_freed_memory()
    return found


def find_places(model: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Return every parameter with the modules and attribute names that use it; a tied parameter has several."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            found.setdefault(p, []).append((module, name))
    return [*found.items()]


def put(parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> None:
    for module, name in places:
        module.register_parameter(name, parameter)
