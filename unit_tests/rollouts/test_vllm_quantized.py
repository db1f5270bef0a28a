"""Real vLLM in int8: it computes what the simulation says, and rounds again after every sync."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollouts.engines.hf_support.quantized import RoundedLinears
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.quantized import has_int8_products, has_tiles
from trainers.weight_sync.fingerprint import fingerprint
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.vllm_lab import (
    PROMPT,
    STOP,
    TEMPERATURE,
    buckets_of,
    gap,
    gap_of_samples,
    logp,
    random_model,
    sample,
    save,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

FAMILY = "qwen2-tied"
"""With biases, and a head that is the embedding."""


def rounded(seed: int) -> PreTrainedModel:
    model = random_model(FAMILY, seed=seed)
    RoundedLinears(model, "int8")
    return model


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.verify)])
def test_int8_is_the_simulations_and_follows_every_sync(dtype: str, tmp_path: Path) -> None:
    if not has_int8_products():
        pytest.skip("this CPU has no VNNI")
    if dtype == "float32" and has_tiles():
        pytest.skip("vLLM's kernel for AMX returns no float32")
    save(FAMILY, tmp_path, seed=0)
    config = engine_config(tmp_path, temperature=TEMPERATURE, stop_token_ids=STOP, quantization="int8", dtype=dtype)
    engine = VllmEngine(config)
    # bfloat16 has a noise of its own
    bound = 0.02 if dtype == "float32" else 0.3

    async def check(seed: int) -> None:
        right, exact = rounded(seed), random_model(FAMILY, seed=seed)
        probe = await engine.probe(PROMPT)
        assert gap(probe, logp(right, PROMPT)) < bound
        if dtype == "float32":
            assert gap(probe, logp(exact, PROMPT)) > 3 * gap(probe, logp(right, PROMPT)), "it is rounded"
        samples = await sample(engine, range(2))
        assert gap_of_samples(right, samples) < bound

    async def body() -> None:
        await check(0)
        for version, seed in ((1, 1), (2, 0)):
            model = random_model(FAMILY, seed=seed).to(getattr(torch, dtype))
            await engine.pause()
            await engine.load_weights(version, buckets_of(model))
            assert await engine.read_fingerprint() == [fingerprint(model.named_parameters())]
            await check(seed)
        await engine.close()

    asyncio.run(body())
