"""Saved models in real vLLM on a CPU: their log-probabilities are the trainer's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from configs.trainer_schema import LoraConfig
from data_prep import add_tokens, tiny_model
from modeling.saved_model import check_saved
from rollouts.engines.vllm import VllmEngine
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.small_trained import batches, trained
from unit_tests.helpers.vllm_lab import BOUND, PROMPT, SHAPE, VOCABULARY, gap, logp, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]


async def probe(folder: Path, prompt: list[int] = PROMPT) -> list[float]:
    engine = VllmEngine(engine_config(folder))
    try:
        return await engine.probe(prompt)
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen2-tied", LoraConfig(r=4, merge_on_save=True)),
        ("mistral-untied", None),
        pytest.param("llama-tied", None, marks=pytest.mark.verify),
    ],
)
def test_a_saved_model_has_the_trainers_logp_in_vllm(family, lora, tmp_path):
    save(family, tmp_path / "base", seed=0)
    trainer = trained(str(tmp_path / "base"), lora, steps=2)
    trainer.save_model(tmp_path / "out")
    check_saved(tmp_path / "out", dtype="float32")
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    wanted = logp(trainer.model, PROMPT)
    assert gap(wanted, logp(start, PROMPT)) > 100 * BOUND, "it was trained"
    assert gap(asyncio.run(probe(tmp_path / "out")), wanted) < BOUND


def test_vllm_loads_a_head_that_only_the_config_ties(tmp_path):
    save("llama-tied", tmp_path / "base", seed=0)
    file = tmp_path / "base" / "model.safetensors"
    torch.manual_seed(1)
    head = torch.randn(VOCABULARY, load_file(file)["model.embed_tokens.weight"].shape[1]) * 0.2
    save_file(load_file(file) | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    trainer = trained(str(tmp_path / "base"), None, steps=0)
    wanted = logp(trainer.model, PROMPT)
    assert gap(asyncio.run(probe(tmp_path / "base")), wanted) < BOUND
    trainer.save_model(tmp_path / "out")
    assert gap(asyncio.run(probe(tmp_path / "out")), wanted) < BOUND


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.verify), False])
def test_new_tokens_have_the_trainers_logp_in_vllm(tied, tmp_path):
    tiny_model.make(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    if tied:
        base.config.tie_word_embeddings = True
        base.tie_weights()
        base.save_pretrained(tmp_path / "base")
    ids = add_tokens.make(str(tmp_path / "base"), tmp_path / "more", tokens=["<think>", "</think>"])
    trainer = trained(str(tmp_path / "more"), None, steps=2)
    trainer.save_model(tmp_path / "out")
    prompt = [5, ids[0], 6, 7, ids[1], 8, ids[0], ids[1], 9]
    assert gap(asyncio.run(probe(tmp_path / "out", prompt)), logp(trainer.model, prompt)) < BOUND


def test_a_trainer_goes_on_beside_vllm_that_runs_its_very_class(tmp_path):
    """vLLM has no Olmo2 of its own: it makes the class of transformers compile itself, for the whole process."""
    torch.manual_seed(0)
    Olmo2ForCausalLM(Olmo2Config(**SHAPE, pad_token_id=0, eos_token_id=1)).save_pretrained(tmp_path / "base")
    trainer = trained(str(tmp_path / "base"), None, steps=1)
    trainer.save_model(tmp_path / "out")
    wanted = logp(trainer.model, PROMPT)
    asked = []
    trainer.model.get_submodule("model").register_forward_hook(lambda *_: asked.append(1))

    async def compare() -> None:
        engine = VllmEngine(engine_config(tmp_path / "out"))
        try:
            assert gap(await engine.probe(PROMPT), wanted) < BOUND
            assert logp(trainer.model, PROMPT) == wanted and asked, "the trainer's model has its hooks"
            check_saved(tmp_path / "out", dtype="float32")
            again = trained(str(tmp_path / "out"), None, steps=0)
            assert logp(again.model, PROMPT) == wanted, "a model that is made beside the engine"
            again.step([batches()])
            assert gap(await engine.probe(PROMPT), wanted) < BOUND
        finally:
            await engine.close()

    asyncio.run(compare())
