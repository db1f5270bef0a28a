"""Rows of a GPU day that measure: waits of the host, checksums, weight sync, and training of Qwen3-0.6B's shape."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from configs.schema import SLConfig
from driver.checks.explain import estimate_memory
from driver.checks.memory_estimate import CUDA_GIB
from driver.load_recipe import load_recipe
from rollouts.engines.base import EngineConfig
from rollouts.engines.hf import HfEngine
from tools.benchmarks import train_throughput
from tools.benchmarks.random_task import QWEN3_0_6B
from tools.benchmarks.train_throughput import measure_matmul, measure_updates, synchronize
from tools.gpu_day.bench import Bench, TrainerOn, make_batches
from tools.gpu_day.rows import ROOT, CheckFailed, NotRun, Numbers
from trainers.observers import BatchSeen, Observer
from trainers.offload.storages import find_tensors, identify
from trainers.trainer import Trainer
from trainers.weight_sync.fingerprint import fingerprint

GIB = 2**30
PROBE_BOUND = 1e-3
"""Largest difference of a log-probability between engine and trainer in float32, in nats."""
MOST_WAITS = 5
"""Waits in a step of one update: the norm, whether the gradient is finite, the metrics, and two more."""
EXPLAIN_BOUND = 15.0
"""Percent by which --explain may be off before the row says so."""


def check_waits(bench: Bench) -> Numbers:
    """Count how often a step of one update reads a result of the device, and so waits for it."""
    if bench.device != "cuda":
        raise NotRun("no device, and no compiler for the pretend one")
    trainer = TrainerOn(bench.device, bench.make_model("bfloat16"), "bfloat16", layout="packed")
    batches = make_batches(70, padded=False)
    trainer.step([batches])
    if bench.pretend is None:
        waits, lines = count_copies_back(lambda: trainer.step([batches])), list_syncs(lambda: trainer.step([batches]))
    else:
        bench.pretend.clear()
        trainer.step([batches])
        lines = Counter({line.split()[0]: n for line, n in bench.pretend.syncs.items()})
        waits = lines.total()
    where = ", ".join(f"{line} x{n}" for line, n in lines.most_common())
    if waits > MOST_WAITS:
        raise CheckFailed(f"a step waits {waits} times, and at most {MOST_WAITS} are expected: {where}")
    return {"micro-batches": len(batches), "waits": waits, "lines": where}


def count_copies_back(step: Callable[[], object]) -> int:
    """Count the copies from the device to the host: each is a result that the host waits for."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize()
    copies = {event.key: event.count for event in profiler.key_averages() if "Memcpy" in event.key}
    if not copies:  # a step copies its batches to the device
        raise NotRun("torch's profiler sees no copies here")
    return sum(n for key, n in copies.items() if "DtoH" in key)


def list_syncs(step: Callable[[], object]) -> Counter[str]:
    """Count the calls that torch says wait for the device, by line. It tells copies to the device, too."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [warning for warning in told if "synchroniz" in str(warning.message)]
    return Counter(f"{warning.filename.removeprefix(f'{ROOT}/')}:{warning.lineno}" for warning in syncs)


def check_checksum(bench: Bench) -> Numbers:
    """Compare checksums of tensors on the device with those of their copies on the CPU, and time them."""
    # sums of checksums are integers, so even the order of a GPU's reduction must not matter
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1000, 96, dtype=dtype, device="cpu")
        if fingerprint([("x", x)]) != fingerprint([("x", x.to(bench.device))]):
            raise CheckFailed(f"the checksum of a tensor of {x.dtype} is another one on {bench.device}")
    rows = 200 if bench.small else 151_936
    shapes = [(rows, 1024), *[(3 * rows // 150, 1024)] * 58]
    named: list[tuple[str, Tensor]] = [
        (str(i), torch.ones(shape, dtype=torch.bfloat16, device=bench.device)) for i, shape in enumerate(shapes)
    ]
    fingerprint(named[:1])
    gib = sum(x.nbytes for _, x in named) / GIB
    synchronize()
    began = time.perf_counter()
    fingerprint(named)
    return {"tensors": len(named), "GiB": gib, "s per GiB": (time.perf_counter() - began) / gib}


def check_sync(bench: Bench) -> Numbers:
    """Sync trained weights to the engine hf and compare log-probabilities; time a sync of a large model."""
    found = asyncio.run(sync_small(bench))
    path = bench.make_large_model()
    trainer, engine = TrainerOn(bench.device, path, "bfloat16"), make_engine(path, "bfloat16")
    gib = sum(p.nbytes for p in trainer.model.parameters()) / GIB
    synchronize()
    began = time.perf_counter()
    asyncio.run(engine.load_weights(1, trainer.export_weights(2**28, "whole")))
    synchronize()
    return found | {"GiB": gib, "with checksums, s per GiB": (time.perf_counter() - began) / gib}


async def sync_small(bench: Bench) -> Numbers:
    """Train, send the weights to an engine that has none, and compare."""
    path = bench.make_model("float32")
    trainer, engine = TrainerOn(bench.device, path, "float32"), make_engine(path, "float32")
    trainer.make_update(make_batches(10_000))
    await engine.load_weights(1, trainer.export_weights(2**16, "whole"))
    done = await engine.generate([5, 6, 7], max_new_tokens=12, seed=0)
    ids = [5, 6, 7, *done.token_ids]
    sent = {k: v for bucket in trainer.export_weights(2**16, "whole") for k, v in fingerprint(bucket).items()}
    proven = await engine.read_fingerprint() == [sent]
    gap = max(abs(a - b) for a, b in zip(await engine.probe(ids), trainer.probe(ids), strict=True))
    if not (proven and gap <= PROBE_BOUND):
        raise CheckFailed(f"engine and trainer differ by {gap:.1e} nats; the checksums are equal: {proven}")
    return {"tensors proven": len(sent), "probe, nats apart": gap}


def make_engine(path: str, dtype: Any) -> HfEngine:
    # starts_empty: only weights that were really sent can make the log-probabilities agree
    settings: dict[str, Any] = {"temperature": 0.9, "max_model_len": 256, "stop_token_ids": [1], "starts_empty": True}
    return HfEngine(EngineConfig(model_path=path, dtype=dtype, **settings))


class Held(Observer):
    """Largest memory after a backward pass, when its activations are free: weights, gradients and optimizer."""

    most_bytes = 0

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_batch(self, seen: BatchSeen) -> None:
        if torch.cuda.is_available():
            held = torch.cuda.memory_allocated()
        else:
            storages = [tensor.untyped_storage() for tensor in find_tensors(self.trainer.policy)]
            held = sum({identify(storage): storage.nbytes() for storage in storages}.values())
        Held.most_bytes = max(Held.most_bytes, held)


def check_throughput(bench: Bench) -> Numbers:
    """Measure updates of Qwen3-0.6B's shape with four micro-batches of 16k packed tokens, and prompts shared or not."""
    tokens, shape = (64, train_throughput.SMALL) if bench.small else (16_384, QWEN3_0_6B)
    path = bench.make_large_model()
    args = train_throughput.parse_arguments(["--sequence", "32" if bench.small else "1024", "--updates", "2"])
    rate = measure_matmul(bench.device, torch.bfloat16, 128 if bench.small else 8192)
    peak = train_throughput.find_peak(torch.cuda.get_device_name()) if bench.device == "cuda" else None
    found: Numbers = {"product of matrices, TFLOP/s": rate / 1e12}
    for name, shared in (("", False), (" shared", True)):
        size: dict[str, Any] = {"shared": shared, "args": args, "vocabulary": shape["vocab_size"]}
        done = measure_updates(path, "bfloat16", tokens, observers={"held": Held}, **size)
        found[f"tokens/s{name}"] = done.tokens / done.seconds
        found[f"MFU{name}, %"] = 100 * done.flops / done.seconds / (peak or rate)
        if done.peak_mib is not None:
            found[f"peak{name}, GiB"] = done.peak_mib / 1024
    return found | compare_with_explain(path, held_gib=Held.most_bytes / GIB)


def compare_with_explain(path: str, *, held_gib: float) -> Numbers:
    """Return the memory without activations beside the estimate of --explain for this model and trainer."""
    recipe = {"name": "gpu_check", "backend": "local", "steps": 1, "rows_per_step": 1, "alg": {"name": "sft"}}
    recipe |= {"model": {"path": path, "dtype": "bfloat16"}, "data": {"train": "none.jsonl", "max_tokens": 1024}}
    said = estimate_memory(load_recipe(SLConfig, recipe, [])).per_rank
    found = beside_explain("without activations, GiB", held_gib, said)
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        of_cuda = (total - free - torch.cuda.memory_reserved()) / GIB
        found |= {"CUDA's own, GiB": of_cuda, "--explain says, of CUDA's own": CUDA_GIB}
    return found


def beside_explain(name: str, measured: float, said: float) -> Numbers:
    """Return a measured size, the estimate of --explain, and whether they agree."""
    off = 100 * (measured / said - 1)
    verdict = f"within {EXPLAIN_BOUND:.0f} %" if abs(off) <= EXPLAIN_BOUND else f"off by {off:+.0f} %"
    return {name: measured, f"--explain says, of {name}": said, "--explain is": verdict}
