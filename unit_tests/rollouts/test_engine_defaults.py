"""What an engine is given and does unless something else is said: settings, groups, and what it lacks."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from core.errors import RunStopped
from core.types.allowed_tokens import EVERY_TOKEN
from core.types.truncation import EVERYTHING_KEPT
from rollouts.engines.base import Capabilities, Completion, Engine, EngineConfig, EngineLacks
from rollouts.engines.hf import HfEngine
from rollouts.engines.http import HttpEngine
from rollouts.engines.vllm import VllmEngine
from unit_tests.helpers.sentences import tell

DEFAULTS = {
    **{"stop_strings": None, "allowed_tokens": EVERY_TOKEN, "truncation": EVERYTHING_KEPT, "routes": False},
    **{"dtype": "bfloat16", "images": "auto", "trust_remote_code": False, "seed": 0, "tensor_parallel_size": 1},
    **{"cores": None, "kv_cache_gib": None, "gpu_memory_utilization": 0.85, "enforce_eager": False},
    **{"prefix_cache": True, "starts_empty": False, "lora": None, "adapter": None, "over_nccl": False},
    **{"timeout_s": 300.0, "pause_mode": "keep", "sleep": None, "over_ipc": False, "quantization": None},
    **{"batch_invariant": False, "server": None, "options": {}},
}


def test_an_engine_has_these_settings_unless_it_is_given_others():
    given: dict[str, Any] = {"model_path": "m", "temperature": 0.5, "max_model_len": 7, "stop_token_ids": (3,)}
    config = EngineConfig(**given)
    assert {one.name: getattr(config, one.name) for one in fields(config)} == given | DEFAULTS


def list_cans(engine: type[Engine]) -> set[str]:
    return {one.name for one in fields(Capabilities) if getattr(engine.capabilities, one.name)}


def test_an_engine_says_what_it_can_do():
    everything = {one.name for one in fields(Capabilities)}
    assert list_cans(Engine) == set() and list_cans(VllmEngine) == everything - {"batch_invariant"}
    of_devices = {"tensor_parallel", "nccl", "ipc"}
    assert list_cans(HttpEngine) == {"tensor_parallel", "broadcast", "chunks", "deltas", "file_names"}
    assert list_cans(HfEngine) == everything - of_devices - {"adapter", "file_names"} and HfEngine.max_batch == 256


class Meeting(Engine):
    """Engine whose requests wait until all of a group are there."""

    def __init__(self, size: int) -> None:
        self.here = asyncio.Barrier(size)

    async def generate(self, token_ids, *, max_new_tokens, seed, **seen):
        await self.here.wait()
        return Completion(token_ids=[seed], logp=[-0.5], versions=[4], stop="length")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_replies_of_a_group_are_sampled_at_the_same_time(size):
    async def go() -> list[Completion]:
        async with asyncio.timeout(5):
            return await Meeting(size).generate_group([1], size=size, max_new_tokens=2, seed=5)

    assert [one.token_ids for one in asyncio.run(go())] == [[5], [6], [7]][:size]


def test_an_engine_without_a_profiler_says_so_when_it_is_to_stop():
    told = tell(lambda: asyncio.run(Meeting(1).stop_trace(Path("x"))), EngineLacks)
    assert told == "this engine has no profiler: leave profile out"


class Failing(Engine):
    """Engine whose first request fails at once, and the others a moment later for a reason of their own."""

    def __init__(self) -> None:
        self.n_later = 0

    async def generate(self, token_ids, *, max_new_tokens, seed, **seen):
        if seed == 5:
            raise OSError("first")
        await asyncio.sleep(0.05)
        self.n_later += 1
        raise RunStopped("later")


def test_a_group_ends_with_its_first_error():
    engine = Failing()

    async def go() -> None:
        await engine.generate_group([1], size=3, max_new_tokens=2, seed=5)

    assert tell(lambda: asyncio.run(go()), OSError) == "first" and engine.n_later == 0
