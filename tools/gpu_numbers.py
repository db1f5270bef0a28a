"""Comparisons of what a GPU computes with what a CPU computes. They run on a CPU too, where they compare its dtypes.

Each returns a sentence with what it measured, and raises CheckFailed where that is beyond its bound. They import torch,
transformers, numpy and pydantic. `python -m tools.gpu_check` runs them, and so do the tests marked `gpu`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algs.sft import SFT
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.types.samples import Batch
from data_feeds.packing.batches import micro_batches
from modeling.attention import attend_by_sequence
from modeling.attention_varlen import fits_varlen, gather_keys
from modeling.forward import Layout, forward
from modeling.load import load_model
from modeling.segments import Segments
from rollouts.engines.base import EngineConfig
from rollouts.engines.hf import HfEngine
from tools.benchmarks.random_task import QWEN3_0_6B, make_groups, save_model
from tools.benchmarks.train_throughput import synchronize
from trainers.local import LocalTrainer
from trainers.trainer import Trainer
from trainers.weight_sync.fingerprint import fingerprint

SHAPE: dict[str, Any] = QWEN3_0_6B | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
BOUND = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest difference of an update, as a share of its norm, from that of a CPU in float32."""
ATTENTION_BOUND = 0.02
"""Largest difference of outputs or gradients of attention in bfloat16, as a share of their norm."""
PROBE_BOUND = 1e-3
"""Largest difference of a log-probability between engine and trainer in float32, in nats."""


class CheckFailed(AssertionError):
    """Number beyond its bound. The message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Place where a check runs."""

    device: str
    """cuda or cpu."""
    folder: Path
    """Folder for models and data, which the checks make."""
    small: bool = False
    """True for sizes that a test can afford on a CPU."""

    def make_model(self, dtype: str) -> str:
        """Return the folder of a random model of SHAPE in this dtype."""
        path = self.folder / f"model_{dtype}"
        if not path.exists():
            save_model(path, SHAPE, dtype=getattr(torch, dtype))
        return str(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Packed row for the attention kernel, in bfloat16."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    heads: tuple[int, int]
    """Heads of the queries, and of keys and values."""
    head_dim: int = 64
    window: int | None = None


APART, FOREST = (-1, -1, -1, -1, -1, -1), (-1, 0, 0, 1, -1, 4)
"""Six segments that share nothing, and two trees of them."""
LENGTHS = (310, 40, 40, 170, 1, 65)
CASES = (
    Rows(lengths=LENGTHS, parents=APART, heads=(4, 4)),
    Rows(lengths=LENGTHS, parents=FOREST, heads=(4, 4)),
    Rows(lengths=LENGTHS, parents=FOREST, heads=(16, 8), head_dim=128),
    Rows(lengths=LENGTHS, parents=APART, heads=(4, 2), window=33),
    Rows(lengths=LENGTHS, parents=FOREST, heads=(4, 2), window=33),
    # a window of two tokens: it ends inside ancestors and inside the segment itself
    Rows(lengths=LENGTHS, parents=FOREST, heads=(4, 1), window=2),
    Rows(lengths=LENGTHS, parents=FOREST, heads=(4, 1), head_dim=256),
    # a prompt whose keys get the gradients of 64 replies
    Rows(lengths=(257, *(33,) * 64), parents=(-1, *(0,) * 64), heads=(4, 2)),
    # the last case is small enough for a CPU, and is the only one of --small
    Rows(lengths=(11, 6, 6, 17, 2, 1), parents=FOREST, heads=(4, 2), head_dim=72, window=9),
)


def compare(what: str, got: Tensor, want: Tensor, bound: float) -> float:
    """Return the norm of the difference as a share of that of `want`. Raises CheckFailed above `bound`."""
    # float64 on the CPU, so that the comparison adds no rounding of its own
    gap = float((got.double().cpu() - want.double().cpu()).norm() / want.double().norm())
    if not gap <= bound:  # a NaN is no number below the bound
        raise CheckFailed(f"{what}: the difference is {gap:.2%}, and at most {bound:.2%} is expected")
    return gap


def check_attention(bench: Bench) -> str:
    """Compare attention over packed rows, with and without shared prefixes and windows, with a CPU's in float32."""
    cases = CASES[-1:] if bench.small else CASES
    worst, kernels = 0.0, set[str]()
    for case in cases:
        segments = Segments([*case.lengths], [*case.parents])
        torch.manual_seed(0)
        shapes = [(1, heads, sum(case.lengths), case.head_dim) for heads in (case.heads[0], *[case.heads[1]] * 2)]
        given = [torch.randn(shape).bfloat16() for shape in shapes]
        slope = torch.randn(1, sum(case.lengths), case.heads[0], case.head_dim)
        inputs = [x.to(bench.device).requires_grad_() for x in given]
        kernels.add("varlen_attn" if fits_varlen(inputs[0]) else "one call per segment")
        got = attend(inputs, slope, segments, case.window)
        # the same rounded numbers as float32, so that only the kernel's own rounding is measured
        want = attend([x.float().requires_grad_() for x in given], slope, segments, case.window)
        for name, ours, theirs in zip(("output", "queries", "keys", "values"), got, want, strict=True):
            worst = max(worst, compare(f"{name} of {case}", ours, theirs, ATTENTION_BOUND))
    if bench.device == "cuda" and kernels != {"varlen_attn"}:
        raise CheckFailed(
            f"rows in bfloat16 went to {', '.join(sorted(kernels))} on this GPU, not to varlen_attn alone"
        )
    return f"{len(cases)} rows with gradients, {' and '.join(sorted(kernels))}: at most {worst:.2%} from a CPU's"


def check_gathering(bench: Bench) -> str:
    """Time the sum of a prompt's gradients over 64 replies, in float32 and in bfloat16, beside attention itself."""
    prompt, reply, heads, head_dim = (8, 2, (4, 2), 8) if bench.small else (1024, 256, (16, 8), 128)
    segments = Segments([prompt, *[reply] * 64], [-1, *[0] * 64])
    shapes = [(1, n, prompt + 64 * reply, head_dim) for n in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device=bench.device).bfloat16().requires_grad_() for shape in shapes]
    keys = segments.index_keys(inputs[0].device).keys
    assert keys is not None
    rows = inputs[1][0].transpose(0, 1)  # [T, H, D]

    def attend_once() -> Tensor:
        return attend_by_sequence(nn.Identity(), *inputs, None, segments=segments)[0]

    whole = time_passes(attend_once, inputs)
    wide = time_passes(lambda: gather_keys(rows, keys), inputs[1:2])
    narrow = time_passes(lambda: rows.index_select(0, keys), inputs[1:2])
    # keys and values are gathered alike
    return f"float32 costs {2 * (wide - narrow):.2f} ms of the {whole:.2f} ms of attention, forward and backward"


def time_passes(compute: Callable[[], Tensor], inputs: list[Tensor]) -> float:
    """Return the milliseconds of a forward and backward pass, the median of five after one to warm up."""
    taken: list[float] = []
    for _ in range(6):
        synchronize()
        began = time.perf_counter()
        torch.autograd.grad(compute().sum(), inputs)
        synchronize()
        taken.append(1000 * (time.perf_counter() - began))
    return sorted(taken[1:])[2]


def attend(inputs: list[Tensor], slope: Tensor, segments: Segments, window: int | None) -> list[Tensor]:
    """Return the output [1, T, H, D] and the gradients of queries, keys and values, all float32 on the CPU."""
    done, _ = attend_by_sequence(nn.Identity(), *inputs, None, sliding_window=window, segments=segments)
    gradients = torch.autograd.grad((done.float() * slope.to(done.device)).sum(), inputs)
    return [x.float().cpu() for x in (done.detach(), *gradients)]


class TrainerOn(LocalTrainer):
    """Local trainer on a device of the caller's choice."""

    def __init__(self, device: str, path: str, dtype: str, *, attention: str = "auto", layout: str = "auto") -> None:
        model: Any = ModelConfig.model_validate({"path": path, "dtype": dtype, "attention": attention})
        given = {"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 0.0, "layout": layout}
        cfg = TrainerConfig.model_validate(given)
        Trainer.__init__(self, model, cfg, SFT(), device=device, temperature=0.9, total_updates=10)

    def make_update(self, batches: list[Batch]) -> Tensor:
        """Train on the batches; return by how much each weight has changed."""
        before = self.flatten_weights()
        self.step([batches])
        return before - self.flatten_weights()


def make_batches(max_tokens: int, **how: Any) -> list[Batch]:
    """Return three groups of four samples that share a prompt, in micro-batches."""
    vocabulary = int(SHAPE["vocab_size"])
    groups = make_groups(2, 4, prompt=24, response=9, vocabulary=vocabulary)
    groups += make_groups(1, 4, prompt=11, response=30, vocabulary=vocabulary)
    [batches] = micro_batches(groups, "token", max_tokens, **how)
    return batches


def check_logp(bench: Bench) -> str:
    """Compare log-probabilities of packed and padded rows with those of a CPU in float32."""
    found: list[str] = []
    for dtype in ("float32", "bfloat16"):
        path = bench.make_model(dtype)
        want = compute_logp("cpu", path, "float32", "padded")
        ways: tuple[Layout, ...] = ("padded", "packed")
        gap = max(float((compute_logp(bench.device, path, dtype, way) - want).abs().mean()) for way in ways)
        # bfloat16 has 8 bits of mantissa, float32 24
        bound = 1e-4 if dtype == "float32" else 0.02
        if not gap <= bound:
            raise CheckFailed(
                f"{dtype}: log-probabilities are {gap:.1e} nats from a CPU's, at most {bound} is expected"
            )
        found.append(f"{dtype} {gap:.1e}")
    return f"mean difference from a CPU's: {', '.join(found)} nats"


@torch.no_grad()
def compute_logp(device: str, path: str, dtype: str, layout: Layout) -> Tensor:
    """Return the log-probabilities of all trained tokens, on the CPU."""
    model = load_model(path, dtype=dtype, attention="auto").to(device)
    [batch] = make_batches(10_000, padded=layout == "padded")
    return forward(model, model, batch.to(device), layout=layout, temperature=0.9).logp.cpu()


def check_update(bench: Bench) -> str:
    """Compare the local trainer's updates, whole, cut and with shared prefixes, with a CPU's in float32."""
    found: list[str] = []
    for dtype, bound in BOUND.items():
        path = bench.make_model(dtype)
        want = TrainerOn("cpu", path, "float32").make_update(make_batches(10_000, padded=True))
        cuts: dict[str, dict[str, Any]] = {
            "whole": {"max_tokens": 10_000, "padded": False},
            "cut": {"max_tokens": 70, "padded": False},
            "shared": {"max_tokens": 10_000, "padded": False, "share_prefixes": True},
        }
        for name, cut in cuts.items():
            trainer = TrainerOn(bench.device, path, dtype, layout="packed")
            gap = compare(f"the update, {name}, {dtype}", trainer.make_update(make_batches(**cut)), want, bound)
            found.append(f"{name} {dtype} {gap:.1e}")
    return f"difference from a CPU's: {', '.join(found)}"


def check_sync(bench: Bench) -> str:
    """Train, sync the weights to the engine hf, and compare the log-probabilities of its completion."""
    path = bench.make_model("float32")
    trainer = TrainerOn(bench.device, path, "float32")
    trainer.make_update(make_batches(10_000))
    # starts_empty: only weights that were really sent can make the log-probabilities agree
    config = EngineConfig(
        model_path=path, dtype="float32", temperature=0.9, max_model_len=256, stop_token_ids=[1], starts_empty=True
    )
    engine = HfEngine(config)

    async def sync_and_probe() -> tuple[list[float], list[float], bool]:
        await engine.load_weights(1, trainer.export_weights(2**16, "whole"))
        done = await engine.generate([5, 6, 7], max_new_tokens=12, seed=0)
        ids = [5, 6, 7, *done.token_ids]
        sent = {k: v for bucket in trainer.export_weights(2**16, "whole") for k, v in fingerprint(bucket).items()}
        return await engine.probe(ids), trainer.probe(ids), await engine.read_fingerprint() == [sent]

    theirs, ours, proven = asyncio.run(sync_and_probe())
    gap = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    if not (proven and gap <= PROBE_BOUND):
        raise CheckFailed(f"engine and trainer differ by {gap:.1e} nats; the fingerprints are equal: {proven}")
    return f"fingerprints are equal, log-probabilities differ by {gap:.1e} nats"


def check_fingerprint(bench: Bench) -> str:
    """Compare the checksums of tensors on the device with those of their copies on the CPU."""
    tensors = [torch.randn(1000, 96, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    # sums of checksums are integers, so even the order of a GPU's reduction must not matter
    for x in tensors:
        if fingerprint([("x", x)]) != fingerprint([("x", x.to(bench.device))]):
            raise CheckFailed(f"the fingerprint of a tensor of {x.dtype} is another one on {bench.device}")
    return f"{len(tensors)} dtypes"
