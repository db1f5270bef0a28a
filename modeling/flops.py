"""Floating-point operations that training a model requires, per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from modeling.experts import list_expert_weights
from modeling.freeze import VISION, match_names

FORWARD, BACKWARD = 2, 4
"""Operations per weight of a matrix and token: a product, and the gradients of input and weight."""
CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k")
"""Names in configurations of the number of experts that compute a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlops:
    """Operations of a forward and a backward pass."""

    per_token: float
    """In matrices of the layers and in the head."""
    per_pair: float
    """In attention, per token and token before it, itself included. 0 where the configuration names no heads."""


def count_training_flops(model: nn.Module) -> TrainingFlops:
    """Count a text model's operations, or those of a vision-language model on text and placed images.

    Without the vision tower, and without what is computed again in the backward pass (Chowdhery et al. 2022, PaLM,
    appendix B). A frozen matrix needs the gradient of its input only.
    """
    towers = match_names(model, VISION)
    total = 0.0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" not in towers:
            # with ZeRO-3, and in four bits, a weight has no shape of its own
            total += module.in_features * module.out_features * _count_per_weight(module.weight)
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    for weight in list_expert_weights(model).values():
        shape = getattr(weight, "ds_shape", weight.shape)
        chosen = next((getattr(text, name) for name in CHOSEN if getattr(text, name, None)), shape[0])
        total += shape[1] * shape[2] * chosen * _count_per_weight(weight)
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return TrainingFlops(per_token=total, per_pair=0.0)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    # two products of a head's size, of which both inputs need gradients
    return TrainingFlops(per_token=total, per_pair=2.0 * (FORWARD + BACKWARD) * layers * heads * size)


def _count_per_weight(weight: nn.Parameter) -> int:
    return FORWARD + (BACKWARD if weight.requires_grad else BACKWARD // 2)
