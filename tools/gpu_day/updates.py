"""Rows of a GPU day that compare log-probabilities and updates of the local trainer with a CPU's in float32.

They run on a CPU too, where they compare its dtypes. The tests marked `gpu` run them as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modeling.forward import forward
from modeling.load import load_model
from modeling.model_inputs import Layout
from tools.gpu_day.bench import BOUND, Bench, TrainerOn, compare, make_batches
from tools.gpu_day.rows import CheckFailed, Numbers

LOGP_BOUND = {"float32": 1e-4, "bfloat16": 0.02}
"""Largest mean difference of log-probabilities from a CPU's in float32, in nats."""


def check_logp(bench: Bench) -> Numbers:
    """Compare log-probabilities of packed and padded rows with those of a CPU in float32."""
    found: Numbers = {}
    ways: tuple[Layout, ...] = ("padded", "packed")
    for dtype, bound in LOGP_BOUND.items():
        path = bench.make_model(dtype)
        want = compute_logp("cpu", path, "float32", "padded")
        gap = max(float((compute_logp(bench.device, path, dtype, way) - want).abs().mean()) for way in ways)
        if not gap <= bound:
            raise CheckFailed(
                f"{dtype}: log-probabilities are {gap:.1e} nats from a CPU's, at most {bound} is expected"
            )
        found[f"{dtype}, nats from a CPU"] = gap
    return found


@torch.no_grad()
def compute_logp(device: str, path: str, dtype: str, layout: Layout) -> Tensor:
    """Return the log-probabilities of all trained tokens, on the CPU."""
    model = load_model(path, dtype=dtype, attention="auto").to(device)
    [batch] = make_batches(10_000, padded=layout == "padded")
    return forward(model, model, batch.to(device), layout=layout, temperature=0.9).logp.cpu()


def check_update(bench: Bench) -> Numbers:
    """Compare the local trainer's updates, whole, cut and with shared prefixes, with a CPU's in float32."""
    found: Numbers = {}
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
            found[f"{name}, {dtype}, % from a CPU"] = 100 * gap
    return found
