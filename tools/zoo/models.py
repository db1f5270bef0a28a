"""Tiny random models of forty architectures, with a tokenizer, as folders in Hugging Face format.

No two dimensions are equal where the architecture allows it, because a transposed square matrix cannot be seen. Norms
and biases are random, because a lost norm of ones cannot be seen either. Scores of attention are large, so that caps
and sinks change the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 250
"""Tokens of every model; no multiple of the padding that engines add."""
WINDOW = 24
"""Sliding window of the families that have one; shorter than the sequences of the checks."""
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""Config of every model; heads of 32, unless an entry says otherwise."""
WIDE = {"head_dim": 64}
"""Heads that together are wider than the hidden state."""
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_key_value_heads": 6,
}
"""Latent attention in the only size that vLLM has: 512 and 64."""
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
"""Gated delta net with heads of 128, the only size of vLLM's CPU kernel."""
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
GEMMA4 = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY}
NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "moe"],
    "num_hidden_layers": 3,
    "moe_shared_expert_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "mamba_num_heads": 6,
    "mamba_head_dim": 64,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 32,
}
BFLOAT16 = frozenset({"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "apertus"})
"""Models that vLLM computes in bfloat16 only: by kernels of its CPU build, or by an activation (Apertus)."""

ZOO: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen2": TIED,
    "qwen3": WIDE,
    "gemma2": WIDE | SLIDING | TIED | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
    "gemma3_text": WIDE | SLIDING | TIED,
    "qwen3_moe": WIDE | EXPERTS | {"decoder_sparse_step": 1, "norm_topk_prob": True},
    "mixtral": WIDE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": WIDE | SLIDING | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": ROUTED
    | LATENT
    | {"n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "n_shared_experts": 1}
    | {"scoring_func": "sigmoid"},  # vLLM's default is another than transformers'
    "qwen3_5_text": WIDE | DELTA,
    "qwen3_5_moe_text": WIDE | DELTA | EXPERTS | {"shared_expert_intermediate_size": 128},
    "qwen3_next": WIDE | DELTA | EXPERTS | {"shared_expert_intermediate_size": 128, "decoder_sparse_step": 1},
    "gemma4_text": WIDE | SLIDING | TIED | {"global_head_dim": 64, "hidden_size_per_layer_input": 32} | GEMMA4,
    "mistral": WIDE | {"sliding_window": WINDOW},
    "ministral3": WIDE,
    "glm4_moe": WIDE | ROUTED | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "use_qk_norm": True},
    "glm4_moe_lite": ROUTED | LATENT | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "olmo3": SLIDING,
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoehybrid": MAMBA
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 128}
    | {"layer_types": ["mamba", "attention"]},
    "nemotron_h": WIDE | ROUTED | NEMOTRON,
    "lfm2": TIED
    | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 320}
    | dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), 192),
    "lfm2_moe": EXPERTS | TIED | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "falcon_h1": WIDE | MAMBA | {"mamba_d_ssm": 384},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 128, "decoder_sparse_step": 1},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 96,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
    "minimax_m2": WIDE
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 32}
    | {"scoring_func": "sigmoid", "use_routing_bias": True},
    "seed_oss": WIDE | {"attention_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "exaone4": WIDE | SLIDING,
    "cohere2": WIDE | SLIDING | TIED | {"logit_scale": 0.5},
    "hunyuan_v1_dense": WIDE,
    "glm4": WIDE,
    "apertus": {},
    "llama4_text": WIDE
    | {"num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 352}
    | {"attention_chunk_size": 32},  # vLLM's chunks are whole blocks of the KV cache
    "kimi_linear": LATENT
    | EXPERTS
    | {"first_k_dense_replace": 1, "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
}
"""Config entries over BASE, by `model_type`."""
CAUSES = {
    "ernie4_5_moe": "vLLM's CPU router ignores the bias of the choice (moe_statics) where scores are a softmax: other "
    "experts are chosen",
    "cohere2": "vLLM's sliding window is a token longer than transformers': tokens beyond the window differ",
}
"""Causes of differences from vLLM 0.32, by model: its own, from the same files."""
ERRORS = {
    "minimax_m2": "vLLM's CPU router has no sigmoid without groups of experts",
    "kimi_linear": "vLLM's class is for GPUs only: it imports CUTLASS",
}
"""Causes of other errors of vLLM 0.32, by model, where its sentence does not name them."""


def make_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Write a random model with a tokenizer, and return it in evaluation mode. The same seed gives the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **BASE | ZOO[name])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    randomize(model, seed=seed)
    model.generation_config.eos_token_id = BASE["eos_token_id"]
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


@torch.no_grad()
def randomize(model: nn.Module, *, seed: int) -> None:
    """Fill the weights with random numbers of useful sizes; add noise to norms, biases and kept buffers."""
    random = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=random)

    kept = model.state_dict().keys()
    parameters = {id(p) for p in model.parameters()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in kept or not tensor.is_floating_point():
            continue
        if tensor.dim() < 2 or id(tensor) not in parameters or "sinks" in name:
            tensor.add_(0.3 * noise(tensor))
            continue
        # queries and keys twice as large: scores of about 4
        scale = 2.0 if any(part in name for part in ("q_proj", "k_proj", "q_b_proj")) else 1.0
        tensor.copy_(scale * noise(tensor) / tensor.shape[-1] ** 0.5)


def make_tokenizer() -> Any:
    """Return a tokenizer of characters, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    characters = [chr(code) for code in range(32, 127)]
    words = [*special, *characters, *(f"<{number}>" for number in range(VOCABULARY - len(special) - len(characters)))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer
