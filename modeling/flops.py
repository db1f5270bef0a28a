"""Floating-point operations that training a model requires."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from modeling.experts import list_blocks, list_expert_weights

FORWARD, BACKWARD = 2, 4
"""Operations per weight of a matrix and token: a product, and the gradients of input and weight."""
CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k")
"""Names in configurations of the number of experts that compute a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlops:
    """Operations of a forward and a backward pass."""

    per_token: float
    """In the matrices of the layers."""
    per_label: float
    """In the head, per trained token."""
    per_pair: float
    """In attention, per token and token before it, itself included."""
    per_near_pair: float
    """The same in layers with a window, per pair within it."""
    window: int
    """Tokens of the window; 0 without such layers."""


def count_training_flops(model: nn.Module) -> TrainingFlops:
    """Count the operations of a causal language model, or of the language part of one that sees.

    What is computed again in the backward pass does not count (Chowdhery et al. 2022, PaLM, appendix B). A frozen
    matrix needs the gradient of its input only.
    """
    wrapped: Any = model
    base: Any = wrapped.get_base_model() if hasattr(model, "peft_config") else wrapped
    text = base.config.get_text_config()
    head = base.get_output_embeddings()
    per_pair, per_near_pair, window = _count_attention(text)
    return TrainingFlops(
        per_token=sum(_count_layers(base.get_decoder(), text)),
        per_label=0.0 if head is None else _count_matrix(head),
        per_pair=per_pair,
        per_near_pair=per_near_pair,
        window=window,
    )


def _count_layers(decoder: nn.Module, text: Any) -> Iterator[float]:
    experts = {block.experts for block in list_blocks(decoder)}
    first = next(iter(_list_layers(text)), text)
    chosen = next((getattr(first, name) for name in CHOSEN if getattr(first, name, None)), None)
    share = chosen / max(experts) if chosen and max(experts, default=0) else 1.0
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield _count_matrix(module) * (share if "experts" in name.split(".") else 1.0)
    for weight in list_expert_weights(decoder).values():
        shape = getattr(weight, "ds_shape", weight.shape)  # with ZeRO-3 it has no shape of its own
        yield shape.numel() * share * _count_per_weight(weight)


def _count_matrix(module: nn.Linear | Conv1D) -> float:
    size = module.nx * module.nf if isinstance(module, Conv1D) else module.in_features * module.out_features
    # a layer in four bits has none
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return size * _count_per_weight(weight)


def _count_per_weight(weight: nn.Parameter | None) -> int:
    return FORWARD + (BACKWARD if weight is not None and weight.requires_grad else BACKWARD // 2)


def _count_attention(text: Any) -> tuple[float, float, int]:
    """Return per_pair, per_near_pair and window; 0 where the configuration names no heads."""
    whole, near, window = 0.0, 0.0, 0
    layers = _list_layers(text)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    for layer, kind in zip(layers, kinds, strict=False):
        heads = getattr(layer, "num_attention_heads", None)
        if not heads or "attention" not in kind or "linear" in kind:
            continue
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        # of keys and of values, in latent attention
        keys = getattr(layer, "qk_nope_head_dim", size) + getattr(layer, "qk_rope_head_dim", 0)
        values = getattr(layer, "v_head_dim", None) or size
        # two products, of which both inputs need gradients
        each = float((FORWARD + BACKWARD) * heads * (keys + values))
        own = (getattr(layer, "sliding_window", None) or 0) if kind == "sliding_attention" else 0
        if own:
            near, window = near + each, own
        else:
            whole += each
    return whole, near, window


def _list_layers(text: Any) -> list[Any]:
    """Return the configuration of each layer."""
    layers = range(getattr(text, "num_hidden_layers", None) or 0)
    return [text.per_layer_config[i] if getattr(text, "is_heterogeneous", False) else text for i in layers]
