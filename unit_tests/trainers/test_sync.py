"""Trainer and engines agree through whole runs: model families, ZeRO stages and tensor parallelism together."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from unit_tests.helpers.runs import check_engines_follow

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


def family_folder(family: str, tiny_path: str, folder: Path) -> str:
    """A random model of the family with the tiny model's tokenizer."""
    shutil.copytree(tiny_path, folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": vocabulary, "max_position_embeddings": 256}
    config = AutoConfig.for_model(family, **shape, **heads, tie_word_embeddings=family in ("qwen2", "llama"))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def follow(recipe, tmp_path, tiny_path, family, zero, ranks, tp, **more):
    changes = more | {
        "model.path": family_folder(family, tiny_path, tmp_path / family),
        **{"trainer.lr": 1e-2, "trainer.zero_stage": zero, "trainer.ranks": ranks, "rollout.tensor_parallel_size": tp},
    }
    _, metrics = check_engines_follow(recipe, tmp_path, **changes)
    assert metrics[2]["train/loss"] != metrics[0]["train/loss"]
    assert all(m["train/grad_norm"] > 0 for m in metrics), "the weights did change"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize(("zero", "ranks", "tp"), [(1, 1, 1), (1, 2, 2), (3, 2, 1), (3, 2, 2)])
def test_engines_follow_the_trainer(recipe, tmp_path, tiny_path, family, zero, ranks, tp):
    follow(recipe, tmp_path, tiny_path, family, zero, ranks, tp)


@pytest.mark.parametrize("transport", ["direct", "disk"])
def test_engines_follow_the_trainer_without_a_process_group(recipe, tmp_path, tiny_path, transport):
    follow(recipe, tmp_path, tiny_path, "qwen2", 3, 2, 2, **{"weight_sync.transport": transport})
