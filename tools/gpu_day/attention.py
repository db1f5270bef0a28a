"""Rows of a GPU day on attention: the kernel for packed rows beside a CPU's, and the cost of float32 gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modeling.attention import attend_by_sequence
from modeling.attention_varlen import fits_varlen, gather_keys
from modeling.segments import Segments
from tools.benchmarks.train_throughput import synchronize
from tools.gpu_day.bench import Bench, compare
from tools.gpu_day.rows import CheckFailed, Numbers

ATTENTION_BOUND = 0.02
"""Largest difference of outputs or gradients of attention in bfloat16, as a share of their norm."""
APART, FOREST = (-1, -1, -1, -1, -1, -1), (-1, 0, 0, 1, -1, 4)
"""Six segments that share nothing, and two trees of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Packed row for the attention kernel, in bfloat16."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    heads: tuple[int, int]
    """Heads of the queries, and of keys and values."""
    head_size: int
    window: int | None = None


def list_cases(*, small: bool) -> list[Rows]:
    """Return rows with every head size, windows, and a prompt that 64 replies share."""
    lengths = (11, 6, 6, 17, 2, 1) if small else (310, 40, 40, 170, 1, 65)
    prompt, reply, replies = (9, 3, 5) if small else (257, 33, 64)
    sizes = ((64, (4, 4)), (128, (4, 2) if small else (16, 8)), (256, (4, 1)))
    cases: list[Rows] = []
    for size, heads in sizes:
        # a window of two tokens ends inside ancestors and inside the segment itself
        for window in (None, 9 if small else 33, 2):
            cases += [
                Rows(lengths=lengths, parents=parents, heads=heads, head_size=size, window=window)
                for parents in (APART, FOREST)
            ]
        # a prompt whose keys get the gradients of all replies
        star = (prompt, *(reply,) * replies), (-1, *(0,) * replies)
        cases.append(Rows(lengths=star[0], parents=star[1], heads=(4, 2), head_size=size))
    return cases


def check_attention(bench: Bench) -> Numbers:
    """Compare attention over packed rows, with and without shared prefixes and windows, with a CPU's in float32."""
    worst: dict[int, float] = {}
    kernels = set[str]()
    cases = list_cases(small=bench.small)
    for case in cases:
        segments = Segments([*case.lengths], [*case.parents])
        torch.manual_seed(0)
        shapes = [(1, heads, sum(case.lengths), case.head_size) for heads in (case.heads[0], *[case.heads[1]] * 2)]
        given = [torch.randn(shape, device="cpu").bfloat16() for shape in shapes]
        slope = torch.randn(1, sum(case.lengths), case.heads[0], case.head_size, device="cpu")
        inputs = [x.to(bench.device).requires_grad_() for x in given]
        kernels.add("varlen_attn" if fits_varlen(inputs[0], inputs[2]) else "one call per segment")
        got = attend(inputs, slope, segments, case.window)
        # the same rounded numbers as float32, so that only the kernel's own rounding is measured
        want = attend([x.float().requires_grad_() for x in given], slope, segments, case.window)
        for name, ours, theirs in zip(("output", "queries", "keys", "values"), got, want, strict=True):
            gap = compare(f"{name} of {case}", ours, theirs, ATTENTION_BOUND)
            worst[case.head_size] = max(gap, worst.get(case.head_size, 0.0))
    if bench.device == "cuda" and kernels != {"varlen_attn"}:
        raise CheckFailed(f"rows in bfloat16 went to {', '.join(sorted(kernels))} on this GPU, not to varlen_attn")
    found: Numbers = {"rows": len(cases), "kernel": ", ".join(sorted(kernels))}
    return found | {f"head size {size}, % from a CPU": 100 * gap for size, gap in worst.items()}


def check_gathering(bench: Bench) -> Numbers:
    """Time the sum of a prompt's gradients over 64 replies, in float32 and in bfloat16, beside attention itself."""
    prompt, reply, heads, head_size = (8, 2, (4, 2), 8) if bench.small else (1024, 256, (16, 8), 128)
    segments = Segments([prompt, *[reply] * 64], [-1, *[0] * 64])
    shapes = [(1, n, prompt + 64 * reply, head_size) for n in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device=bench.device).bfloat16().requires_grad_() for shape in shapes]
    keys = segments.index_keys(inputs[0].device).keys
    assert keys is not None
    rows = inputs[1][0].transpose(0, 1)  # [T, H, D]

    def attend_once() -> Tensor:
        return attend_by_sequence(nn.Identity(), *inputs, None, segments=segments)[0]

    whole = time_passes(attend_once, inputs)
    wide = time_passes(lambda: gather_keys(rows, keys), inputs[1:2])
    narrow = time_passes(lambda: rows.index_select(0, keys), inputs[1:2])
    cost = 2 * (wide - narrow)  # keys and values are gathered alike
    return {"attention, ms": whole, "float32 costs of it, ms": cost, "share, %": 100 * cost / whole}


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
