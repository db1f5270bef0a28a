"""FSDP2 units: modules whose parameters are all-gathered together and freed after use.

model
  embedding     a unit, unless the head shares its weight
  block 0       a unit
  ...
  block n       a unit
  head          a unit, unless it shares the embedding's weight
  the rest      the unit of the model itself, which is kept from the forward pass to the backward pass
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from modeling.blocks import find_blocks


def shard_model(model: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype, offload: bool) -> None:
    """Shard a model in place over the ranks of `mesh`, unit by unit. The model may be on the meta device.

    Trained parameters become float32 and are gathered in `dtype`. An adapter stays whole on every rank. offload: store
    the shards in CPU memory.
    """
    hf: Any = model
    hf.tie_weights()
    adapter = set(list_adapter(model))
    of_memory = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    # its inputs are token ids and what was made in its dtype, and `Segments` cannot be copied as torch would
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in [*find_units(model), model]:
        for p in unit.parameters():
            if p.requires_grad and p not in adapter and not isinstance(p, DTensor):
                p.data = p.data.float()
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=of_memory, ignored_params=adapter)
        sharded.set_gradient_divide_factor(1.0)  # a token's weight is its share of the whole update
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    hf.set_reduce_scatter_unused_params(True)


@torch.no_grad()
def settle_shards(model: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype, offload: bool) -> nn.Module:
    """Return a loaded model that is sharded and on the device.

    offload: shards are on the CPU; tensors that are not sharded are on the device.
    """
    device = torch.device(mesh.device_type)
    for p in list_adapter(model):
        p.data = p.data.to(device=device, dtype=torch.float32)
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        shard_model(model, mesh, dtype=dtype, offload=offload)

    def own(tensor: Tensor) -> Tensor:
        is_shard = isinstance(tensor, DTensor)
        value = tensor.to(dtype) if is_shard else tensor  # the files may have a wider one
        # a copy: on a CPU it may be the memory of a file, which cannot be freed
        return value.to(device="cpu" if is_shard and offload else device, dtype=tensor.dtype, copy=True)

    settled: set[Tensor] = set()
    for module in model.modules():
        held = {*module.parameters(recurse=False), *module.buffers(recurse=False)} - settled
        for tensor in held:
            if isinstance(tensor, DTensor):
                torch.utils.swap_tensors(tensor, nn.Parameter(own(tensor), tensor.requires_grad))
            else:
                tensor.data = own(tensor)
        if held:
            module.load_state_dict({}, strict=False)  # afterwards FSDP2 has the new tensors, and lets go of the old
        settled |= held
    return model


def list_adapter(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained adapter parameters, or an empty list for a model without an adapter."""
    return [p for p in model.parameters() if p.requires_grad] if hasattr(model, "peft_config") else []


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the submodules that become FSDP2 units."""
    hf: Any = model
    blocks = find_blocks(model, use="trainer.strategy=fsdp2 shards", fix="set trainer.strategy=deepspeed")
    ends = [hf.get_input_embeddings(), hf.get_output_embeddings()]
    apart = [m for m in ends if m is not None]
    # two units cannot share a parameter: tied weights belong to the unit of the model
    if len(apart) == 2 and apart[0].weight is apart[1].weight:
        apart = []
    return [*blocks, *apart]
