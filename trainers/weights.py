"""The tensors of a model under the names by which the outside knows them, whatever is wrapped around it in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

Part = Literal["whole", "adapter"]
"""Of a model: all its weights, with the adapter (if it has one) merged in; or the adapter alone."""


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
        from trainers.lora import adapter_pieces, merged_pieces

        return {"whole": merged_pieces(model), "adapter": adapter_pieces(model)}
    return {"whole": [piece_of(name, p) for name, p in model.named_parameters()]}


def piece_of(name: str, parameter: nn.Parameter) -> Piece:
    return Piece(name=name, nbytes=parameter.nbytes, parameters=[parameter], make=parameter.detach)
