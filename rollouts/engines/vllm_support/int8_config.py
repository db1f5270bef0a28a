"""Registration of our int8 method in vLLM; int8.py computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from rollouts.engines.vllm_support.quantized import INT8


@register_quantization_config(INT8)
class Int8Config(QuantizationConfig):
    """Configuration of a model whose linear layers are int8; embedding and head are not."""

    def get_name(self) -> Any:
        return INT8

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # Turing, the first with the kernels

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8Config:
        raise NotImplementedError("weights are rounded from full precision")

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        # here: vLLM replaces kernels when a worker starts, and fails if all of them have been imported before
        from vllm.model_executor.layers.linear import LinearBase

        from rollouts.engines.vllm_support.int8 import Int8Linear

        return Int8Linear() if isinstance(layer, LinearBase) else None
