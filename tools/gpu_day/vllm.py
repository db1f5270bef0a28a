"""Rows of a GPU day for vLLM: an engine in this process, and short runs on Ray over handles and over NCCL."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from driver.checks.memory_estimate import estimate_engine_gib
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm import VllmEngine
from tools.gpu_day.bench import Bench, TrainerOn
from tools.gpu_day.rows import CheckFailed, Numbers
from tools.gpu_day.runs import SMALL_STEPS, make_quickstart, reinforce
from tools.gpu_day.speeds import beside_explain
from trainers.weight_sync.fingerprint import describe_difference, fingerprint

GIB = 2**30
PROBE = list(range(30, 94))
PROBE_BOUND = 0.05
"""Largest mean difference of log-probabilities between vLLM and the trainer in bfloat16, in nats."""
UTILIZATION = 0.4
"""Part of the GPU for the engine; the trainer is beside it."""


def check_engine(bench: Bench) -> Numbers:
    """Start an engine without weights, send it a trainer's, sample, let it sleep and wake, and compare again."""
    return asyncio.run(use_engine(bench))


async def use_engine(bench: Bench) -> Numbers:
    path = bench.make_large_model()
    trainer = TrainerOn(bench.device, path, "bfloat16")
    began, before = time.perf_counter(), measure_used_gib()
    settings: dict[str, Any] = {"temperature": 1.0, "max_model_len": 512, "stop_token_ids": [1], "starts_empty": True}
    settings |= {"gpu_memory_utilization": UTILIZATION, "sleep": "offload"}
    settings |= {"kv_cache_gib": 0.25} if bench.device == "cpu" else {}
    engine = VllmEngine(EngineConfig(model_path=path, dtype="bfloat16", **settings))
    found: Numbers = {"start, s": time.perf_counter() - began}
    if bench.device == "cuda":
        gpu_gib = torch.cuda.mem_get_info()[1] / GIB
        said = estimate_engine_gib(gpu_gib, utilization=UTILIZATION, enforce_eager=False)
        found |= beside_explain("engine, GiB", measure_used_gib() - before, said)
    try:
        found["probe, nats apart"] = await sync_and_compare(engine, trainer, version=1)
        found["tokens/s"] = await measure_sampling(engine, n=4 if bench.small else 64)
        awake = measure_used_gib()
        began = time.perf_counter()
        await engine.sleep()
        found |= {"sleep, s": time.perf_counter() - began, "freed, GiB": awake - measure_used_gib()}
        found["asleep, GiB"] = measure_used_gib() - before
        began = time.perf_counter()
        await engine.wake("weights")
        gap = await sync_and_compare(engine, trainer, version=2)
        found |= {"wake with weights, s": time.perf_counter() - began, "probe after, nats apart": gap}
    finally:
        await engine.close()
    # of 0.6B in bfloat16 the weights alone are 1.1 GiB
    if bench.device == "cuda" and not float(found["freed, GiB"]) > 1:
        raise CheckFailed(f"an engine that sleeps frees {found['freed, GiB']:.2f} GiB")
    return found


async def sync_and_compare(engine: VllmEngine, trainer: TrainerOn, *, version: int) -> float:
    """Send the weights with proof, wake the cache if it sleeps, and return the mean gap of the probe in nats."""
    await engine.pause()  # of an engine that has slept this does nothing
    await engine.load_weights(version, trainer.export_weights(2**28, "whole"))
    if version > 1:
        await engine.wake("kv_cache")
    sent = {k: v for bucket in trainer.export_weights(2**28, "whole") for k, v in fingerprint(bucket).items()}
    if wrong := describe_difference(sent, await engine.read_fingerprint()):
        raise CheckFailed(f"after sync {version}: {wrong}")
    pairs = zip(await engine.probe(PROBE), trainer.probe(PROBE), strict=True)
    gap = sum(abs(a - b) for a, b in pairs) / (len(PROBE) - 1)
    if not gap <= PROBE_BOUND:
        raise CheckFailed(f"after sync {version} engine and trainer differ by {gap:.1e} nats on average")
    return gap


async def measure_sampling(engine: VllmEngine, *, n: int) -> float:
    """Return the tokens per second of `n` completions at once."""
    began = time.perf_counter()
    done = await asyncio.gather(*[engine.generate(PROBE, max_new_tokens=128, seed=seed) for seed in range(n)])
    return sum(len(completion.token_ids) for completion in done) / (time.perf_counter() - began)


def measure_used_gib() -> float:
    """Return the memory of the GPU in use, of all processes; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def check_colocate(bench: Bench) -> Numbers:
    """Run the quickstart with trainer and engine on one GPU; every sync is proven, or the run stops."""
    home = bench.folder / "colocate"
    make_quickstart(home, small=bench.small)
    return reinforce(home, {"placement": "colocate"} | on_ray(bench), small=bench.small)


def check_nccl(bench: Bench) -> Numbers:
    """Run steps with a GPU each for trainer and engine; every sync is proven, or the run stops."""
    home = bench.folder / "nccl"
    make_quickstart(home, small=True)
    transport = "nccl" if bench.device == "cuda" else "gloo"
    changes = SMALL_STEPS | {"weight_sync.transport": transport} | on_ray(bench)
    return {"transport": transport} | reinforce(home, changes, small=True)


def on_ray(bench: Bench) -> dict[str, Any]:
    small_cache = {} if bench.device == "cuda" else {"rollout.kv_cache_gib": 0.25}
    return {"backend": "ray", "rollout.engine": "vllm"} | small_cache
