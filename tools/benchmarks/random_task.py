"""A random model of a given shape and samples for it: what the measurements of memory and speed train on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from core.types.samples import Group, Prompt, Sample, make_sample

QWEN3_0_6B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
"""Shape of Qwen3-0.6B; a random model has no tokenizer, so it has no special tokens either."""


def save_model(folder: Path, shape: dict[str, Any], *, dtype: torch.dtype) -> None:
    """Save a Qwen 3 of this shape, with random weights, as the trainers load it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # the same weights for every process that makes the model
    torch.manual_seed(0)
    config = Qwen3Config(**shape, dtype=dtype, bos_token_id=None, eos_token_id=None)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)


def make_groups(groups: int, size: int, *, prompt: int, response: int, vocabulary: int) -> list[Group]:
    """Make `size` samples each of `groups` prompts, by chance; every token of a response is trained."""
    rng = random.Random(0)

    def make_tokens(n: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(n)]

    def make_group(number: int) -> Group:
        shared = make_tokens(prompt)
        return [
            make_random_sample(number, shared, make_tokens(response), advantage=rng.gauss(0, 1)) for _ in range(size)
        ]

    return [make_group(number) for number in range(groups)]


def make_random_sample(group: int, prompt: list[int], response: list[int], *, advantage: float) -> Sample:
    n = len(prompt) + len(response)
    return make_sample(
        prompt=Prompt(id=str(group), messages=[]),
        token_ids=prompt + response,
        action_mask=[False] * len(prompt) + [True] * len(response),
        # roughly what random weights give to a token of a large vocabulary
        rollout_logp=[0.0] * len(prompt) + [-10.0] * len(response),
        versions=[-1] * len(prompt) + [0] * len(response),
        reward=0.0,
        advantage=[advantage] * n,
    )
