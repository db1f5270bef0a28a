"""Small models that are trained for a few steps in this process, with or without an adapter, and their files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from algs import find_algorithm
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.types.samples import Batch
from data_feeds.packing.batches import micro_batches
from trainers.local import LocalTrainer
from unit_tests.helpers.examples import some_groups

IDS = torch.arange(2, 40)[None]


def trainer_of(
    path: str,
    lora: LoraConfig | None,
    *,
    seed: int = 0,
    dtype="float32",
    alg=None,
    attention="sdpa",
    quantization=None,
    **cfg,
) -> LocalTrainer:
    torch.manual_seed(seed)
    alg = alg or {"name": "grpo"}
    return LocalTrainer(
        ModelConfig(path=path, dtype=dtype, attention=attention, lora=lora, quantization=quantization),
        TrainerConfig(**{"lr": 1e-2, **cfg}),
        find_algorithm(alg)[1](**alg),
        temperature=1.0,
        total_updates=10,
    )


def batches(groups=None) -> list[Batch]:
    [micro] = micro_batches(groups or some_groups(), "token", 10_000)
    return micro


def trained(path: str, lora: LoraConfig | None, *, steps: int = 3, **settings) -> LocalTrainer:
    trainer = trainer_of(path, lora, **settings)
    for _ in range(steps):
        trainer.step([batches()])
    return trainer


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def a_base(folder: Path, *, tied: bool = False, own_head: bool = False, **generation) -> str:
    """A random Llama; own_head: its files hold another head, though its config ties it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    if own_head:
        file = folder / "model.safetensors"
        save_file(load_file(file) | {"lm_head.weight": torch.randn(64, 32)}, file, metadata={"format": "pt"})
    if generation:
        edit(folder / "generation_config.json", **generation)
    return str(folder)


def rewrite(folder: Path, change) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
