"""Row layout of a model before it is loaded: that of a small random model with the same kinds of layers.

The small model has the config's classes, kinds of layers, heads and windows in small numbers. The model itself is
measured when it is loaded.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from core.errors import UserError, first_line
from modeling.attention import attend_by_sequence_if_able, set_attention
from modeling.head import use_scoring_head
from modeling.hf_config import choose_class, read_config
from modeling.layout_probe import LayoutProbe, Setting, probe_layout
from modeling.pretrained import build_from_config

MOST_PARAMETERS = 50_000_000
"""Size of a random model that is made for a forecast."""
SMALL = {
    **dict.fromkeys(("vocab_size", "max_window_layers"), 256),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp", "block_ff_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "chunk_size"), 16),
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
}
"""Largest values of a small config. Heads keep their width, since rotary sections depend on it."""
MOST_LAYERS = 4
NO_SMALL_MODEL = "measured when the model is loaded (no small model can be made of its config: {})"


def forecast_layout(
    path: str, *, attention: str, layout: Setting, key: str = "model.path", trust_remote_code: bool = False
) -> LayoutProbe | str:
    """Return the measured layout of a small model with this config, or why there is none.

    Raises UserError for a setting that the small model refutes, or for an unreadable config.
    """
    try:
        model = build_small(path, attention=attention, key=key, trust_remote_code=trust_remote_code)
        if isinstance(model, str):
            return model
        return probe_layout(model, model, device="cpu", layout=layout, key=key)
    except UserError:
        raise
    except Exception as error:  # a border, as below
        return NO_SMALL_MODEL.format(first_line(error))


def build_small(
    path: str, *, attention: str, key: str = "model.path", trust_remote_code: bool = False
) -> nn.Module | str:
    """Return a small random model with this config, or why there is none. Raises UserError for an unreadable config."""
    config = read_config(path, key=key, trust_remote_code=trust_remote_code)
    auto = choose_class(config, path=path, key=key)
    try:
        model = _build(auto, config, trust_remote_code=trust_remote_code)
        if model is None:
            return "measured when the model is loaded"
        if attention == "auto":
            attend_by_sequence_if_able(model)
        elif attention in ("sdpa", "eager"):
            set_attention(model, attention)
        else:
            return f"measured when the model is loaded, with {attention} attention"
        return model
    except Exception as error:  # a border: small numbers may not fit together in the model's code
        return NO_SMALL_MODEL.format(first_line(error))


def _build(auto: Any, config: Any, *, trust_remote_code: bool) -> nn.Module | None:
    small = _shrink(config)
    with torch.device("meta"):
        empty = build_from_config(auto, small, trust_remote_code=trust_remote_code)
    if sum(p.numel() for p in empty.parameters()) > MOST_PARAMETERS:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small.dtype = torch.float32
        model = build_from_config(auto, copy.deepcopy(small), trust_remote_code=trust_remote_code).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # large enough that every layer matters
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    use_scoring_head(model)
    return model.eval()  # without dropout, as a loaded model


def _shrink(config: Any) -> Any:
    """Return a copy of a config with a layer of each kind, and small numbers."""
    text = config.get_text_config()
    written: dict[str, str] = text.attribute_map  # names in this family's config of names that others have
    values = text.to_dict()
    named = {name: values.get(written.get(name, name)) for name in sorted({*values, *written})}
    small = _shrink_values(named)
    values |= {written.get(name, name): value for name, value in small.items()}
    if text is config:
        return type(config).from_dict(values)
    whole = config.to_dict()
    part = next(name for name in config.sub_configs if getattr(config, name) is text)
    return type(config).from_dict(whole | {part: values})


def _shrink_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that change."""
    layers: int = values["num_hidden_layers"] or 0
    per_layer = {name: v for name, v in values.items() if isinstance(v, list) and len(v) == layers}
    kinds = [tuple(str(v[i]) for v in per_layer.values()) for i in range(layers)]
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:MOST_LAYERS] if per_layer else [*range(min(layers, 2))]
    small: dict[str, Any] = {name: [v[i] for i in kept] for name, v in per_layer.items()}
    small["num_hidden_layers"] = len(kept)
    whole = {name: v for name, v in values.items() if isinstance(v, int)}
    small |= {name: most for name, most in SMALL.items() if whole.get(name, 0) > most}
    small |= {name: None for name, v in whole.items() if name.endswith("token_id") and v >= SMALL["vocab_size"]}
    heads: int = values["num_attention_heads"]
    if heads > 2:
        # kernels of experts take multiples of 16
        small |= {"hidden_size": -(-values["hidden_size"] // heads * 2 // 16) * 16, "num_attention_heads": 2}
        if (of_keys := values.get("num_key_value_heads")) is not None:
            small["num_key_value_heads"] = 2 if of_keys == heads else 1
    return small
