"""Linear layers that are rounded to eight bits, as vLLM quantises them, and compute in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.rollout_schema import Quantization
from core.errors import UserError
from modeling.experts import list_blocks

LARGEST = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}
"""Largest number of a format, to which the largest of a row is scaled."""


def round_rows(values: Tensor, kind: Quantization) -> Tensor:
    """Round each row to eight bits with a scale of its own, [.., K] -> [.., K].

    >>> round_rows(torch.tensor([[127.0, 1.4, -0.6], [2.54, 0.011, 0.0]]), "int8").tolist()
    [[127.0, 1.0, -1.0], [2.5399999618530273, 0.019999999552965164, 0.0]]
    """
    wide = values.float()
    # a row of zeros has no scale
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST[kind]).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (wide / scale).clamp(-LARGEST[kind], LARGEST[kind])
    rounded = scaled.round() if kind == "int8" else scaled.to(torch.float8_e4m3fn).float()
    return (rounded * scale).to(values.dtype)


def refuse_experts(kind: Quantization | None, model: nn.Module) -> None:
    """Raise UserError for a mixture that would be rounded."""
    if kind is not None and list_blocks(model):
        raise UserError(f"rollout.quantization={kind}: the engine hf rounds no experts of a mixture: leave it out")


class RoundedLinears:
    """Linear layers of a model, except the head: weights are rounded per output channel, inputs per token."""

    def __init__(self, model: nn.Module, kind: Quantization) -> None:
        """Round the weights. Raises UserError for a mixture, whose experts are no linear layers."""
        refuse_experts(kind, model)
        self.kind: Quantization = kind
        head = model.get_output_embeddings()
        self.layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head]
        for layer in self.layers:
            layer.register_forward_pre_hook(self._round_inputs)
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Round weights that were loaded."""
        for layer in self.layers:
            layer.weight.copy_(round_rows(layer.weight, self.kind))

    def _round_inputs(self, _layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (round_rows(inputs[0], self.kind),)
