"""Experts of a mixture and their routers, found by the names that transformers 5 gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlock:
    """Block of a mixture: the parent of the module `experts`, which chooses between them and calls them."""

    name: str
    module: nn.Module
    experts: int
    """Number of experts."""

    @property
    def layer(self) -> int:
        """Number of the decoder layer that it belongs to.

        >>> ExpertBlock(name="model.layers.12.mlp", module=nn.Module(), experts=8).layer
        12
        """
        return next(int(part) for part in self.name.split(".") if part.isdigit())


def list_blocks(model: nn.Module) -> list[ExpertBlock]:
    """Return the blocks of experts, in order of the layers; [] for a model that is no mixture."""
    found: list[ExpertBlock] = []
    for name, module in model.named_modules():
        experts: Any = getattr(module, "experts", None)
        if isinstance(experts, nn.Module):
            while hasattr(experts, "base_layer"):  # an adapter around them
                experts = experts.base_layer
            number = getattr(experts, "num_experts", None) or (len(experts) if hasattr(experts, "__len__") else 0)
            found.append(ExpertBlock(name=name, module=module, experts=number))
    return found


def is_router(model: nn.Module, name: str) -> bool:
    """Tell whether a module chooses between experts: it is named gate or router, beside `experts`."""
    parent, _, last = name.rpartition(".")
    return last in ("gate", "router") and isinstance(getattr(model.get_submodule(parent), "experts", None), nn.Module)


def list_expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that hold all experts of a layer, of three dimensions, by name, also below an adapter."""
    return {
        f"{name}.{own}": p
        for name, module in model.named_modules()
        if name.replace(".base_layer", "").rpartition(".")[2] == "experts"
        for own, p in module.named_parameters(recurse=False)
        # with ZeRO-3 a parameter has no shape of its own
        if len(getattr(p, "ds_shape", p.shape)) == 3
    }
