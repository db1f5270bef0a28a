"""Settings of small engines, the Hugging Face engine, and many requests to it at once."""

import asyncio
from pathlib import Path

from rollouts.engines.base import EngineConfig
from rollouts.engines.hf import HfEngine

PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15], [9, 9]]


def engine_config(path: str | Path, **settings) -> EngineConfig:
    """Return the settings of an engine of a small model in float32."""
    small = {"dtype": "float32", "temperature": 0.7, "max_model_len": 256, "stop_token_ids": [1], "kv_cache_gib": 0.1}
    return EngineConfig(model_path=str(path), **small | settings)


def engine_of(path: str, *, max_batch: int = 256, **settings) -> HfEngine:
    engine = HfEngine(engine_config(path, **settings))
    engine.max_batch = max_batch
    return engine


async def several(engine, prompts, seeds, n=12):
    return await asyncio.gather(
        *(engine.generate(p, max_new_tokens=n, seed=s) for p, s in zip(prompts, seeds, strict=True))
    )
