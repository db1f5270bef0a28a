"""The small model of a forecast: a layer of each kind, and no number above those that a small model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from core.errors import UserError
from core.patches import read_attention
from modeling.layout_forecast import build_small

LARGEST = {
    256: ("vocab_size", "max_window_layers"),
    64: ("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp", "block_ff_dim"),
    32: ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    4: ("num_experts", "num_local_experts", "n_routed_experts", "linear_num_value_heads"),
    2: ("num_experts_per_tok", "moe_topk", "linear_num_key_heads"),
    1: (
        *("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"),
        *("num_dense_layers", "moe_layer_start_index"),
    ),
    16: (
        *("sliding_window", "attention_chunk_size", "mamba_d_state", "ssm_state_size", "state_size"),
        *("mamba_chunk_size", "chunk_size"),
    ),
}
RANKS = ("q_lora_rank", "kv_lora_rank")
SMALL = {name: most for most, names in LARGEST.items() for name in names} | dict.fromkeys(RANKS, 32)


def build(folder: Path, family: str = "llama", attention: str = "auto", **config: Any) -> Any:
    AutoConfig.for_model(family, **config).save_pretrained(folder)
    return build_small(str(folder), attention=attention)


def find_changes(model: Any, family: str, **config: Any) -> dict[str, Any]:
    """What the small config has in place of the config's values."""
    given: PreTrainedConfig = AutoConfig.for_model(family, **config)
    before = given.get_text_config().to_dict()
    after = model.config.get_text_config().to_dict()
    written = ("architectures", "dtype", "transformers_version", "_name_or_path")
    return {name: value for name, value in after.items() if before.get(name) != value and name not in written}


@pytest.mark.parametrize(
    ("family", "config", "changes"),
    [
        ("llama", {"hidden_size": 80, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}, {}),
        ("llama", {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 2}, {
            "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        }),
        ("llama", {"hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5}, {
            "hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
        }),
        ("gpt2", {"n_layer": 3, "n_embd": 64, "n_head": 4}, {
            "n_layer": 2, "n_embd": 32, "n_head": 2,
        }),
        ("qwen2", {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 6,
                   "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 4}, {
            "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
        }),
    ],
)  # fmt: skip
def test_heads_and_layers_become_few(tmp_path, family, config, changes):
    config = {"vocab_size": 256, "intermediate_size": 64, "bos_token_id": 1, "eos_token_id": 2, **config}
    model = build(tmp_path, family, **config)
    assert find_changes(model, family, **config) == changes


def test_every_size_has_a_largest_value(tmp_path):
    """Sizes at it stay, and larger ones are cut to it; the head's width stays."""
    shape = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pad_token_id": 255,
        "eos_token_id": 256,
    }
    config = {**shape, **SMALL, "bos_token_id": 0}
    assert find_changes(build(tmp_path / "at", **config), "llama", **config) == {"eos_token_id": None}
    config |= {name: most + 1 for name, most in SMALL.items()}
    assert find_changes(build(tmp_path / "above", **config), "llama", **config) == SMALL | {"eos_token_id": None}


def test_a_layer_of_each_kind_is_kept_and_four_at_most(tmp_path):
    kinds = ["b", "a", "b", "c", "a", "d", "e", "a"]
    config = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 8, "sorts": kinds, "numbers": [1] * 8}
    changes = find_changes(build(tmp_path / "one", **config), "llama", **config)
    assert {name: changes.get(name) for name in ("num_hidden_layers", "sorts", "numbers")} == {
        "num_hidden_layers": 4,
        "sorts": ["b", "a", "c", "d"],
        "numbers": [1] * 4,
    }
    config |= {"sorts": ["a"] * 8, "numbers": [0, 1, 0, 1, 0, 0, 0, 0], "other": [1, 2]}
    changes = find_changes(build(tmp_path / "two", **config), "llama", **config)
    assert {name: changes.get(name) for name in ("num_hidden_layers", "sorts", "numbers", "other")} == {
        "num_hidden_layers": 2,
        "sorts": ["a", "a"],
        "numbers": [0, 1],
        "other": None,
    }


def test_the_weights_are_always_the_same_and_large_enough(tmp_path):
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "dtype": "bfloat16"}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    model = build(tmp_path, **shape)
    assert torch.equal(torch.get_rng_state(), state) and not model.training
    again = build_small(str(tmp_path), attention="auto")
    assert not isinstance(again, str)
    for (name, p), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, other) and p.dtype == torch.float32
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            assert float(p.detach().std()) * p.shape[-1] ** 0.5 == pytest.approx(1.5, rel=0.05), name
    assert type(model.get_output_embeddings()).__name__ == "ScoringHead"


@pytest.mark.parametrize(
    ("family", "attention", "config", "found"),
    [
        ("llama", "auto", {}, "by_sequence"),
        ("llama", "sdpa", {}, "sdpa"),
        ("llama", "eager", {}, "eager"),
        ("llama", "flash_attention_2", {}, "measured when the model is loaded, with flash_attention_2 attention"),
        ("llama", "fixed_order", {}, "measured when the model is loaded, with fixed_order attention"),
        ("gpt2", "auto", {"n_embd": 3000, "n_head": 2, "n_inner": 1}, "measured when the model is loaded"),
        (
            "granitemoehybrid", "auto", {},
            "measured when the model is loaded (no small model can be made of its config: Class validation error for "
            "validator 'validate_architecture':)",
        ),
    ],
)  # fmt: skip
def test_the_attention_is_the_asked_one_or_the_load_decides(tmp_path, family, attention, config, found):
    model = build(tmp_path, family, attention, **config)
    said = model if isinstance(model, str) else read_attention(model.config.get_text_config())
    assert said == found


def test_a_config_that_cannot_be_read_is_told_by_its_key(tmp_path):
    with pytest.raises(UserError, match=rf"^reward\.model: {tmp_path}/config\.json cannot be read as a model config"):
        (tmp_path / "config.json").write_text("{")
        build_small(str(tmp_path), attention="auto", key="reward.model")
