"""Linear layers of vLLM with int8 weights and inputs, rounded from weights in full precision.

vLLM's kernels take rounded weights from files. Here the weights come from the trainer, and are rounded once they are
loaded, at the start and in each weight update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.utils.torch_utils import set_default_torch_dtype

LARGEST = 127


class Int8Linear(LinearMethodBase):
    """Method of a linear layer: a scale per output channel, and one per token for inputs."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **loading: Any,
    ) -> None:
        """Create the weights in full precision, as they are loaded."""
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        UnquantizedLinearMethod.create_weights(self, layer, *sizes, params_dtype, **loading)
        self.dtype, layer.logical_widths = params_dtype, output_partition_sizes
        for name in ("input_scale", "input_zero_point", "azp_adj"):
            layer.register_parameter(name, None)
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=type(self).__name__
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Round the weights [N, K], and hand them to the kernel."""
        weight = layer.weight.float()
        scale = (weight.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        rounded = (weight / scale).round().clamp(-LARGEST, LARGEST)
        layer.weight = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        # the kernel for CPUs writes its output in the default dtype, which vLLM sets while it loads a model only
        with set_default_torch_dtype(self.dtype):
            self.kernel.process_weights_after_loading(layer)
        # a kernel for CPUs points to it, and an update copies it to the layer's first one and would free it
        self.scale = layer.weight_scale.data

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)
