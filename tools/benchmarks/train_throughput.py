"""Tokens per second of training, and the share of the device's peak: python -m tools.benchmarks.train_throughput

A random model of Qwen3-0.6B's shape, in bfloat16 on a GPU and float32 on a CPU, and the local trainer as a run uses it.
Micro-batches are planned and packed, and each update is forward passes, backward passes and AdamW. Groups of samples
share their prompt, as in reinforcement learning; prompt and response are half a sequence each. The first update is
warm-up; the medians of the rest are printed, for each size of a micro-batch.

Share of the peak (MFU): floating-point operations of the model, 6 per weight and token plus those of attention, by the
operations that the device can make in that time. Nothing that is computed twice counts twice. The head counts at
trained tokens only. The peak is the data sheet's for dense bfloat16 where the table below has the GPU, otherwise the
rate of a large product of matrices. That rate is measured in the same process and always printed.

It needs torch, transformers and pydantic, and neither ray nor deepspeed, vllm or peft. --small is for tests.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from algs.base import Algorithm
from algs.grpo import GRPO
from algs.sft import SFT
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.types.samples import Batch
from data_feeds.packing.batches import plan_update
from tools.benchmarks.random_task import QWEN3_0_6B, make_groups, save_model
from trainers.local import LocalTrainer
from trainers.observers import ObserverFactory

SMALL = QWEN3_0_6B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "A100": 312,
    "L40S": 362,
}
"""Dense bfloat16 without sparsity, by NVIDIA's data sheets. The first name that the device's name contains counts."""
GROUP = 8
COLUMNS = ("micro-batch", "sequence", "shared", "tokens/s", "TFLOP/s", "MFU", "ms/update", "peak-MiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Median update of one setting."""

    tokens: int
    """Tokens of all samples of an update; a shared prompt counts once for each sample."""
    flops: float
    seconds: float
    peak_mib: float | None
    """Largest memory that torch had allocated on the GPU, model and optimizer included; None on a CPU."""


def main() -> None:
    args = parse_arguments(None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rate = measure_matmul(device, getattr(torch, dtype), 512 if args.small else 8192 if device == "cuda" else 2048)
    table = find_peak(name) if dtype == "bfloat16" else None
    peak, source = (table, "data sheet") if table else (rate, "measured product of matrices")
    print(f"{name}, {dtype}, torch {torch.__version__}, loss {args.loss}, {args.micro_batches} micro-batches an update")
    print(f"product of matrices {rate / 1e12:.2f} TFLOP/s; MFU is of {peak / 1e12:.2f} TFLOP/s ({source})\n")
    print("".join(f"{column:>13}" for column in COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        shape = SMALL if args.small else QWEN3_0_6B
        save_model(Path(folder), shape, dtype=getattr(torch, dtype))
        for tokens in args.tokens:
            for shared in [False, True] if args.share else [False]:
                done = measure_updates(folder, dtype, tokens, shared=shared, args=args, vocabulary=shape["vocab_size"])
                speed = done.flops / done.seconds
                sequence = min(args.sequence, tokens)
                cells = [f"{tokens}", f"{sequence}", "yes" if shared else "no", f"{done.tokens / done.seconds:.0f}"]
                cells += [f"{speed / 1e12:.3f}", f"{speed / peak:.1%}", f"{1000 * done.seconds:.0f}"]
                cells += ["-" if done.peak_mib is None else f"{done.peak_mib:.0f}"]
                print("".join(f"{cell:>13}" for cell in cells), flush=True)


def find_peak(device: str) -> float | None:
    """Return the operations per second in bfloat16 by the data sheet of a GPU of this name; None if it is unknown.

    >>> find_peak("NVIDIA H100 PCIe"), find_peak("NVIDIA A10")
    (756000000000000.0, None)
    """
    # H100 is a part of two other names, which stand before it
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items() if known in device), None)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.train_throughput", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="in a micro-batch (1024 to 16384)")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sequence, half of them prompt")
    parser.add_argument("--micro-batches", type=int, default=4, help="in an update")
    parser.add_argument("--updates", type=int, default=5, help="that are timed")
    parser.add_argument("--loss", default="grpo", choices=["grpo", "sft"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--attention", default="auto", help="model.attention")
    parser.add_argument("--logits-mib", type=int, help="trainer.logits_mib; its default if not given")
    parser.add_argument("--checkpointing", action="store_true", help="trainer.gradient_checkpointing")
    parser.add_argument("--share", action="store_true", help="measure with trainer.share_prefixes too")
    parser.add_argument("--small", action="store_true", help="a tiny model, for tests")
    args = parser.parse_args(argv)
    args.tokens = args.tokens or ([256, 512] if args.small else [1024, 2048, 4096, 8192, 16_384])
    if min(args.tokens) < 2 or args.sequence < 2 or min(args.micro_batches, args.updates) < 1:
        parser.error("give at least 2 tokens, one micro-batch and one update")
    return args


def measure_updates(
    model: str,
    dtype: str,
    tokens: int,
    *,
    shared: bool,
    args: argparse.Namespace,
    vocabulary: int,
    observers: Mapping[str, ObserverFactory] = MappingProxyType({}),
) -> Measured:
    """Make updates of `tokens` tokens in each micro-batch; return the median one."""
    on_gpu = torch.cuda.is_available()
    gc.collect()  # the trainer of a measurement before this one has reference cycles, and holds memory until then
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    alg: Algorithm = GRPO() if args.loss == "grpo" else SFT()
    settings: dict[str, Any] = {"micro_batch_tokens": tokens, "gradient_checkpointing": args.checkpointing}
    if args.logits_mib is not None:
        settings["logits_mib"] = args.logits_mib
    settings["share_prefixes"] = "auto" if shared else "off"
    chosen = ModelConfig(path=model, dtype=dtype, attention=args.attention)
    of_run: dict[str, Any] = {"temperature": 1.0, "total_updates": args.updates + 1, "observers": observers}
    trainer = LocalTrainer(chosen, TrainerConfig(**settings), alg, **of_run)
    sequence = min(args.sequence, tokens)
    samples = args.micro_batches * (tokens // sequence)
    # groups of equal size, whatever fits into the micro-batches
    size = math.gcd(samples, GROUP)
    half = sequence // 2  # the last token of a sequence is no input
    groups = make_groups(samples // size, size, prompt=half, response=sequence - half + 1, vocabulary=vocabulary)
    layout = trainer.describe_layout()
    shares = layout.shares_prefixes
    [batches] = plan_update(groups, alg.loss_norm, tokens, padded=layout.padded, share_prefixes=shares).batches()
    columns = trainer.compute_columns(batches, alg.required_columns)
    for batch, found in zip(batches, columns, strict=True):
        batch.tokens = batch.tokens.replace(**found)
    taken = [time_update(trainer, batches) for _ in range(args.updates + 1)][1:]
    return Measured(
        tokens=sum(len(sample.token_ids) - 1 for group in groups for sample in group),
        flops=sum(count_flops(trainer.model, batch) for batch in batches),
        seconds=statistics.median(taken),
        peak_mib=torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None,
    )


def time_update(trainer: LocalTrainer, batches: list[Batch]) -> float:
    synchronize()
    start = time.perf_counter()
    trainer.step([batches])
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait until the GPU, if there is one, has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_flops(model: nn.Module, batch: Batch) -> float:
    """Count the operations of forward and backward pass: the backward pass makes twice those of the forward pass."""
    hf: Any = model
    config, head = hf.config, hf.get_output_embeddings()
    # two operations for each weight and token: a product and a sum
    body = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
    pairs = float((batch.position_ids + 1).sum())  # a token attends to itself and to those before it
    # two products of matrices, scores and values, of two operations each
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    forward = 2 * body * len(batch.input_ids) + 2 * head.weight.numel() * len(batch.labels) + attention
    return 3 * forward


def measure_matmul(device: str, dtype: torch.dtype, size: int) -> float:
    """Return the operations per second of the fastest of ten products of square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    taken: list[float] = []
    # one more than is counted: the first compiles or loads the kernel
    for _ in range(11):
        synchronize()
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize()
        taken.append(time.perf_counter() - start)
    # the fastest: what slows a product down is not the device's own rate
    return 2 * size**3 / min(taken[1:])


if __name__ == "__main__":
    sys.exit(main())
