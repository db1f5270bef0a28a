"""The Hugging Face engine of the tiny model, and many requests to it at once."""

import asyncio

from rollouts.engines.base import EngineConfig
from rollouts.engines.hf import HfEngine

PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15], [9, 9]]


def engine_of(path, temperature=0.7, max_batch=256, **settings) -> HfEngine:
    config = EngineConfig(
        model_path=path, dtype="float32", temperature=temperature, max_model_len=256, stop_token_ids=[1], **settings
    )
    engine = HfEngine(config)
    engine.max_batch = max_batch
    return engine


async def several(engine, prompts, seeds, n=12):
    return await asyncio.gather(
        *(engine.generate(p, max_new_tokens=n, seed=s) for p, s in zip(prompts, seeds, strict=True))
    )
