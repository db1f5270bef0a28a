"""Frozen linear layers in four bits: QLoRA's NF4 with doubly quantised scales, by bitsandbytes.

Let D be the dequantised weight, rounded to the model's dtype. A layer computes x D^T and keeps only the four bits
between its passes. The policy is D plus the adapter: engines, saved models and proofs get D + s B A
(modeling/export.py). https://arxiv.org/abs/2305.14314
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from configs.trainer_schema import LoraConfig, ModelConfig
from core.device import find_device
from core.errors import UserError
from modeling.experts import list_expert_weights
from modeling.hf_config import meta_model
from modeling.lora import is_plain_linear, modules_in_reach

BLOCK, SCALE_BLOCK = 64, 256
"""Weights with the same scale, and scales that are quantised together: QLoRA's numbers."""
BYTES = 1 / 2 + (1 + 4 / SCALE_BLOCK) / BLOCK
"""Bytes of a weight: four bits, and its share of a scale of one byte and of that scale's own in float32."""


class Nf4Linear(nn.Linear):
    """Frozen linear layer whose weight is kept in four bits.

    The tensors are buffers without a place in files: no trainer casts, shards or saves them, and all of them move them.
    """

    packed: Tensor
    scales: Tensor
    scales_of_scales: Tensor
    offset: Tensor
    code: Tensor

    def __init__(self, linear: nn.Linear, *, device: str):
        """Quantise a layer. device: where it is computed; the result is on the layer's device."""
        from bitsandbytes.functional import quantize_4bit

        nn.Module.__init__(self)  # that of nn.Linear would make a weight
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.dtype = linear.weight.dtype
        packed, state = quantize_4bit(
            linear.weight.detach().to(device), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        parts = {
            "packed": packed,
            "scales": state.absmax,
            "scales_of_scales": state.state2.absmax,
            "offset": state.offset,
            "code": state.state2.code,
        }
        for name, tensor in parts.items():
            self.register_buffer(name, tensor.to(linear.weight.device), persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight: [out, in]."""
        return self.out_features, self.in_features

    @property
    def weight(self) -> Tensor:
        """Dequantised weight [out, in], a new tensor at every call."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        scales = QuantState(self.scales_of_scales, code=self.code, blocksize=SCALE_BLOCK, dtype=torch.float32)
        state = QuantState(
            self.scales,
            shape=torch.Size(self.shape),
            dtype=self.dtype,
            blocksize=BLOCK,
            quant_type="nf4",
            offset=self.offset,
            state2=scales,
        )
        return dequantize_4bit(self.packed, state)

    def forward(self, input: Tensor) -> Tensor:
        """Compute x D^T + b: [.., in] -> [.., out]."""
        return _Product.apply(input, self)


class _Product(torch.autograd.Function):
    """x D^T + b, with D dequantised in each pass. Plain autograd would keep D from the forward to the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight, layer.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight, None


def quantize(model: nn.Module) -> None:
    """Replace the layers of `list_quantized` in place, one at a time."""
    device = find_device()
    for name, layer in list_quantized(model).items():
        model.set_submodule(name, Nf4Linear(layer, device=device))


def list_quantized(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that are quantised, by name: those of `all-linear`, of the language part."""
    reach = modules_in_reach(model, LoraConfig())
    return {name: m for name, m in reach if type(m) is nn.Linear and is_plain_linear(model, name)}


def check_quantization(model: ModelConfig) -> None:
    """Raise UserError before the start if the model cannot be quantised."""
    key = f"model.quantization={model.quantization}"
    empty_model = meta_model(model.path, trust_remote_code=model.trust_remote_code)
    if find_spec("bitsandbytes") is None:
        raise UserError(
            f"{key}: the package bitsandbytes is not installed: pip install -c constraints.txt bitsandbytes"
        )
    if list_expert_weights(empty_model):
        raise UserError(
            f"{key} is of linear layers, and the experts of model.path={model.path} are tensors of three dimensions, "
            "which would stay as they are: leave it out"
        )
    if not list_quantized(empty_model):
        raise UserError(f"{key}, and model.path={model.path} has no linear layers below its head: leave it out")
