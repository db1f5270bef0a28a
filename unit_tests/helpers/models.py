"""Small random models of every family, samples for them, and their gradients."""

import random
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.types.samples import Policy
from data_feeds.packing.batches import pack
from data_prep.tiny_model import make_tokenizer, save_model
from modeling.attention import BY_SEQUENCE, set_attention
from modeling.head import use_scoring_head
from modeling.softmax import Softmax
from unit_tests.helpers.examples import a_sample

FAMILIES = ("gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Families without experts and recurrent layers, whose packed rows must share prefixes."""


def random_model(family: str, attention: str = "sdpa", **more):
    """The same weights whatever the attention."""
    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "pad_token_id": 0,
        **more,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shape)
    by_torch = None if attention == BY_SEQUENCE else attention  # None: transformers' choice
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=by_torch)
    if attention == BY_SEQUENCE:
        set_attention(model, BY_SEQUENCE)
    assert model.config._attn_implementation == attention
    use_scoring_head(model)
    return model


def make_mixture(folder: Path) -> None:
    """Save a tiny mixture of four experts, two at a time, with the tiny model's tokenizer."""
    tokenizer = make_tokenizer()
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "max_position_embeddings": 256}
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = random_model("qwen3_moe", vocab_size=len(tokenizer), initializer_range=0.05, **sizes, **special)
    save_model(model, tokenizer, folder)


def compute_policy(logits: torch.Tensor, labels: torch.Tensor, **softmax) -> Policy:
    """What a forward pass computes of all logits at once, [M, V]. softmax: fields of Softmax."""
    rows = Softmax(labels=labels, **softmax)
    return rows.name_rows(rows.compute_at_once(logits))


def some_samples(*lengths: int):
    rng = random.Random(0)
    return [a_sample(rng, length=n) for n in lengths]


def packed(samples):
    return pack(samples, [1.0] * len(samples))
