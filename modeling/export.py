"""Export a model's tensors under the names of Hugging Face files, whatever wraps the model in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from configs.trainer_schema import ModelConfig
from core.types.weights import Bucket, ExportScope

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

from modeling.lora import ADAPTER, merged_experts, merged_weight
from modeling.nf4 import Nf4Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """Tensor that the trainer saves or sends."""

    name: str
    dtype: torch.dtype
    """Exported dtype; parameters in training may have a wider dtype."""
    parameters: list[Tensor]
    """Parameters it is computed from, the first of the same shape, or a buffer. Sharded parameters must be gathered
    first."""
    make: Callable[..., Tensor]
    """Function that computes it from whole parameters."""
    unpacked: tuple[int, ...] | None = None
    """Shape, where the first tensor has another: it holds a quantised weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.unpacked is not None:
            return self.unpacked
        first = self.parameters[0]
        return tuple(getattr(first, "ds_shape", first.shape))  # with ZeRO-3 a parameter has no shape of its own

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @torch.no_grad()
    def compute(self, read: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
        """Return the current value without gradient, possibly the parameter's own memory.

        read: returns a whole parameter.
        """
        return self.make(*(read(p) for p in self.parameters)).to(self.dtype)


def exported_tensors(model: nn.Module) -> dict[ExportScope, list[ExportedTensor]]:
    """Return the exported tensors by scope, under the model's names: all weights and saved buffers, and the adapter."""
    if hasattr(model, "peft_config"):
        return {"whole": export_merged(model), "adapter": export_adapter(model)}
    return {"whole": [export_parameter(name, p) for name, p in [*model.named_parameters(), *saved_buffers(model)]]}


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that files hold beside the parameters, by name: the bias of a router's choice, for example."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def export_parameter(name: str, parameter: Tensor) -> ExportedTensor:
    return ExportedTensor(name=name, dtype=parameter.dtype, parameters=[parameter], make=_leave_as_it_is)


def _leave_as_it_is(parameter: Tensor) -> Tensor:
    return parameter


def export_merged(model: PeftModel) -> list[ExportedTensor]:
    """Return all weights under the base model's names, with the adapter merged into copies."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    layers = {id(get_weight(module)): module for module in base.modules() if isinstance(module, LoraLayer)}
    adapter = {id(p) for p in model.parameters() if p.requires_grad}
    exported = []
    for name, p in [*base.named_parameters(), *saved_buffers(base)]:
        # the adapter has no tensors of its own here: it is merged into the layers below
        if id(p) in adapter:
            continue
        layer, plain = layers.get(id(p)), export_parameter(name.replace("base_layer.", ""), p)
        exported.append(plain if layer is None else _export_merged_layer(plain.name, layer))
    for name, module in base.named_modules():
        if isinstance(module, Nf4Linear):
            layer, plain = layers.get(id(module.packed)), _export_dequantized(name.replace(".base_layer", ""), module)
            exported.append(plain if layer is None else _merge_dequantized(plain, module, layer))
    return exported


def get_weight(layer: LoraLayer) -> Tensor:
    """Return the weight that a layer's adapter changes, possibly in four bits: of a linear layer, or of all experts."""
    base = layer.get_base_layer()
    if isinstance(base, Nf4Linear):
        return base.packed
    return layer.get_param() if hasattr(layer, "parameter_name") else base.weight


def _export_dequantized(name: str, layer: Nf4Linear) -> ExportedTensor:
    def make(_: Tensor) -> Tensor:
        return layer.weight

    return ExportedTensor(
        name=f"{name}.weight", dtype=layer.dtype, parameters=[layer.packed], make=make, unpacked=layer.shape
    )


def _merge_dequantized(plain: ExportedTensor, layer: Nf4Linear, adapter: LoraLayer) -> ExportedTensor:
    merged = _export_merged_layer(plain.name, adapter)

    def make(_: Tensor, *of_adapter: Tensor) -> Tensor:
        return merged.make(layer.weight, *of_adapter)

    return replace(plain, parameters=merged.parameters, make=make)


def _export_merged_layer(name: str, layer: LoraLayer) -> ExportedTensor:
    weight, a, b = get_weight(layer), layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    magnitude = layer.lora_magnitude_vector[ADAPTER].weight if ADAPTER in layer.lora_magnitude_vector else None
    if hasattr(layer, "parameter_name"):
        transposed = bool(getattr(layer.get_base_layer(), "is_transposed", False))
        make = partial(merged_experts, scaling=layer.scaling[ADAPTER], transposed=transposed)
    else:
        make = partial(merged_weight, scaling=layer.scaling[ADAPTER], transposed=layer.fan_in_fan_out)
    parameters = [p for p in (weight, a, b, magnitude) if p is not None]
    return ExportedTensor(name=name, dtype=weight.dtype, parameters=parameters, make=make)


def export_adapter(model: PeftModel) -> list[ExportedTensor]:
    """Return the adapter's tensors under the names of PEFT's files."""
    return [export_parameter(_name_in_file(name), p) for name, p in model.named_parameters() if p.requires_grad]


def _name_in_file(name: str) -> str:
    # PEFT's files leave the adapter's name out, so that it can be loaded under any name
    return name.replace(f"lora_magnitude_vector.{ADAPTER}.weight", "lora_magnitude_vector").replace(f".{ADAPTER}.", ".")


def saved_scopes(model: ModelConfig) -> list[ExportScope]:
    """Return the scopes that a run saves."""
    lora = model.lora
    # the adapter of a quantised base would be used with the files' weights, which are another policy's
    if lora is None or model.quantization is not None:
        return ["whole"]
    return ["whole", "adapter"] if lora.merge_on_save else ["adapter"]


def gather_tensors(
    export: Callable[[int, ExportScope], Iterable[Bucket]], scopes: list[ExportScope], *, keeps: bool = True
) -> dict[ExportScope, dict[str, Tensor]]:
    """Return copies of the exported tensors on the CPU, by scope and name.

    keeps: False for a rank that takes part in gathering and does not write; it keeps no copy.
    """
    found: dict[ExportScope, dict[str, Tensor]] = {scope: {} for scope in scopes}
    for scope, copies in found.items():
        for bucket in export(2**28, scope):
            if keeps:
                # a copy, because an exported tensor may be the parameter's own memory, which the next update changes
                copies |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket}
    return found
