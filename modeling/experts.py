"""Experts of a mixture and their routers, found by the names that transformers 5 gives them."""

from __future__ import annotations

from torch import nn


def is_router(model: nn.Module, name: str) -> bool:
    """Tell whether a module chooses between experts: it is named gate or router, beside `experts`."""
    parent, _, last = name.rpartition(".")
    return last in ("gate", "router") and isinstance(getattr(model.get_submodule(parent), "experts", None), nn.Module)


def list_expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that hold all experts of a layer, of three dimensions, by name."""
    return {
        f"{name}.{own}": p
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
        for own, p in module.named_parameters(recurse=False)
        # with ZeRO-3 a parameter has no shape of its own
        if len(getattr(p, "ds_shape", p.shape)) == 3
    }
