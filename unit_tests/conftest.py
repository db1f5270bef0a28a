import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = dict(
    vocab_size=64,
    max_position_embeddings=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    eos_token_id=1,
    bos_token_id=None,
    pad_token_id=0,
)  # head_dim 32: the least that vLLM's CPU attention takes


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> str:
    """A random two-layer Llama, saved."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return str(folder)
