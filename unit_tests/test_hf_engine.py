"""What the engine says it sampled with is what the model says."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rollouts.hf_engine import HfEngine

PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15], [9, 9]]


def engine_of(path, temperature=0.7) -> HfEngine:
    return HfEngine(model_path=path, dtype="float32", temperature=temperature, stop_token_ids=[1])


async def several(engine, prompts, seeds, n=12):
    return await asyncio.gather(
        *(engine.generate(p, max_new_tokens=n, seed=s) for p, s in zip(prompts, seeds, strict=True))
    )


def test_log_probabilities_are_those_of_a_forward_pass_at_the_temperature(tiny_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    for prompt, done in zip(PROMPTS, asyncio.run(several(engine_of(tiny_path), PROMPTS, range(4))), strict=True):
        ids = prompt + done.token_ids
        logp = (model(torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
        want = [float(logp[t - 1, ids[t]]) for t in range(len(prompt), len(ids))]
        assert done.logp == pytest.approx(want, abs=1e-5)
        assert (done.stop == "eos") == (done.token_ids[-1] == 1)
        assert done.stop == "eos" or len(done.token_ids) == 12


def test_a_request_does_not_depend_on_its_neighbours_and_its_seed_decides(tiny_path):
    engine = engine_of(tiny_path)
    together = asyncio.run(several(engine, PROMPTS, range(4)))
    alone = [asyncio.run(several(engine, [p], [i]))[0] for i, p in enumerate(PROMPTS)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    other = asyncio.run(several(engine, PROMPTS, range(10, 14)))
    assert [c.token_ids for c in together] != [c.token_ids for c in other]


def test_the_models_own_generation_config_changes_nothing(tiny_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, top_p=0.1, temperature=0.01, eos_token_id=1)
    model.save_pretrained(tmp_path)
    expected = asyncio.run(several(engine_of(tiny_path), PROMPTS, range(4)))
    got = asyncio.run(several(engine_of(str(tmp_path)), PROMPTS, range(4)))
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


def test_frequencies_are_the_probabilities(tiny_path):
    """4000 draws of the first token: every count within five standard deviations."""
    engine = engine_of(tiny_path, temperature=0.3)
    n = 4000
    done = asyncio.run(several(engine, [[5, 6]] * n, range(n), n=1))
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    p = (model(torch.tensor([[5, 6]])).logits[0, -1] / 0.3).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=len(p))
    assert ((counts - n * p).abs() < 5 * (n * p * (1 - p)).sqrt() + 1).all()
