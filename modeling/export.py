"""The tensors of a model under the names by which the outside knows them, whatever is wrapped around it in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from configs.trainer_schema import LoraConfig
from weight_sync.base import Part

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

from modeling.lora import ADAPTER, merged_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor that leaves the trainer."""

    name: str
    nbytes: int
    parameters: list[nn.Parameter]
    """What it is made from; with ZeRO-3 they must be gathered first."""
    make: Callable[[], Tensor]
    """Its value now, without gradient. It may be the parameter's own memory."""


def pieces_of(model: nn.Module) -> dict[Part, list[Piece]]:
    """Every part that this model has. Call it before ZeRO-3, which hides the sizes."""
    if hasattr(model, "peft_config"):
        return {"whole": merged_pieces(model), "adapter": adapter_pieces(model)}
    return {"whole": [piece_of(name, p) for name, p in model.named_parameters()]}


def piece_of(name: str, parameter: nn.Parameter) -> Piece:
    return Piece(name=name, nbytes=parameter.nbytes, parameters=[parameter], make=parameter.detach)


def merged_pieces(model: PeftModel) -> list[Piece]:
    """All weights of the model under the names it had before it was wrapped, the adapter merged into copies."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    layers = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    adapter = {id(p) for p in model.parameters() if p.requires_grad}
    pieces = []
    for name, p in base.named_parameters():
        if id(p) in adapter:
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        plain = piece_of(name.replace(".base_layer.", "."), p)
        pieces.append(plain if layer is None else _merged_piece(plain.name, layer))
    return pieces


def _merged_piece(name: str, layer: LoraLayer) -> Piece:
    weight, a, b = layer.get_base_layer().weight, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    magnitude = layer.lora_magnitude_vector[ADAPTER].weight if ADAPTER in layer.lora_magnitude_vector else None
    make = partial(
        torch.no_grad()(merged_weight),
        *(weight, a, b),
        scaling=layer.scaling[ADAPTER],
        magnitude=magnitude,
        transposed=layer.fan_in_fan_out,
    )
    parameters = [p for p in (weight, a, b, magnitude) if p is not None]
    return Piece(name=name, nbytes=weight.nbytes, parameters=parameters, make=make)


def adapter_pieces(model: PeftModel) -> list[Piece]:
    """The adapter under the names that it has in a file of PEFT's."""
    return [piece_of(_name_in_file(name), p) for name, p in model.named_parameters() if p.requires_grad]


def _name_in_file(name: str) -> str:
    return name.replace(f"lora_magnitude_vector.{ADAPTER}.weight", "lora_magnitude_vector").replace(f".{ADAPTER}.", ".")


def saved_parts(lora: LoraConfig | None) -> list[Part]:
    """What a run leaves behind."""
    if lora is None:
        return ["whole"]
    return ["whole", "adapter"] if lora.merge_on_save else ["adapter"]


def save_parts(model: nn.Module, folder: Path, parts: dict[Part, dict[str, Tensor]]) -> None:
    """A whole model in Hugging Face format, so that `model.path` can name the folder, and its adapter below it.

    An adapter alone, in PEFT's format, lies in the folder itself.
    """
    from safetensors.torch import save_file

    if "whole" in parts:
        base = model.get_base_model() if "adapter" in parts else model
        base.save_pretrained(folder, state_dict=parts["whole"])
    if "adapter" in parts:
        home = folder / "adapter" if "whole" in parts else folder
        home.mkdir(parents=True, exist_ok=True)
        save_file(parts["adapter"], home / "adapter_model.safetensors", metadata={"format": "pt"})
        model.peft_config[ADAPTER].save_pretrained(home)
