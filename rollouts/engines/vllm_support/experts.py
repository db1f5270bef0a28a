"""Mixtures of experts in a weight update of vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from core.types.weights import Bucket

STREAMED = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
"""Names of a single expert's tensors in vLLM's gpt_oss, by the names of all experts' tensors in its files."""


def repack_experts(model: nn.Module) -> None:
    """Make the next update pack the experts for the kernel again. Call it before the layers become placeholders.

    On a CPU vLLM packs them only with the first weights, and later copies unpacked weights over packed ones. On a GPU
    graphs have captured the kernel, and its weights are copied rightly.
    """
    for layer in _list_experts(model):
        if layer.w13_weight.device.type == "cpu":
            layer.quant_method.moe_kernel = None


def find_unpacked(model: nn.Module) -> list[str]:
    """Return the layers of experts whose weights did not all arrive, so that they have no kernel."""
    names = {layer: name for name, layer in model.named_modules()}
    return [names[layer] for layer in _list_experts(model) if layer.quant_method.moe_kernel is None]


def _list_experts(model: nn.Module) -> list[RoutedExperts]:
    return [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]


def name_for_loader(model: nn.Module, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under names whose loaders of vLLM survive a reload.

    The loader of gpt_oss writes all experts of a layer at once, without a weight loader, and a reload loses that. One
    expert at a time it does use one.
    """
    by_expert = getattr(getattr(model, "config", None), "model_type", None) == "gpt_oss"
    for name, tensor in bucket:
        layer, _, last = name.rpartition(".")
        if by_expert and layer.endswith(".mlp.experts") and last in STREAMED:
            yield from ((f"{layer}.{number}.{STREAMED[last]}", expert) for number, expert in enumerate(tensor))
        else:
            yield name, tensor
