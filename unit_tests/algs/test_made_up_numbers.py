"""What every algorithm makes of the made-up step: advantages, loss, metrics, accepted groups and state, as they were.

Losses and advantages have their oracles; these numbers are for what has none: what is logged, and rare settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algs import find_algorithm, list_algorithms
from algs.base import Algorithm, Metrics
from algs.check.fixtures import made_up_step
from algs.check.replay import make_up_step_seen
from algs.check.update import compute_advantages, make_policy, plan_batches
from algs.objective import compute_objective
from core.types.samples import Batch, Group
from unit_tests.helpers.variants import MORE, NEEDED, VARIANTS

NUMBERS = Path(__file__).parent.parent / "data" / "made_up_numbers.json"
UNEVEN = {"clip_low": 0.15, "clip_high": 0.45}
"""Bounds that are not each other's: as they come many are equal."""
BESIDE: list[tuple[str, dict[str, Any]]] = [
    *((name, UNEVEN) for name in ("clip_cov", "ppo", "qae", "reinforce_pp", "passk")),
    ("grpo", {"correction": {"level": "geometric", "mode": "clip", "max_drift": 0.2}, "kl": {"coef": 0.1}}),
    ("grpo", {"adaptive_entropy": {"target": 0.5}, "leave_one_out": True, "scale_rewards": "mean"}),
    ("ppo", {"critic_lam": 0.5, "value_clip": 0.1, "gamma": 0.9}),
    ("dppo", {"divergence": "kl", "delta_low": 0.05, "delta_high": 0.02}),
    ("raft", {"clip": 0.2, "keep": "best"}),
    ("dpo", {"length_decay": 0.5, "nll_coef": 0.5}),
]
ALGORITHMS = {
    f"{name} {json.dumps(settings, sort_keys=True)}": (name, settings)
    for name, settings in [*((name, {}) for name in list_algorithms()), *VARIANTS, *MORE, *BESIDE]
}


def shorten(values: Any) -> float:
    """Sum of all numbers, each with a weight of its own, to six digits; one that is not finite counts as 9."""
    flat = np.nan_to_num(np.asarray(values, dtype=np.float64).ravel(), nan=9.0, posinf=9.0, neginf=9.0)
    return float(f"{flat @ np.cos(np.arange(len(flat))):.6g}")


def list_metrics(alg: Algorithm, batch: Batch, tables: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    found: list[Metrics] = []
    if alg.model_kind != "reward":
        done = compute_objective(alg, make_policy(alg, batch, tables), batch)
        found += [{"loss": done.loss}, done.metrics, *(metrics for _, metrics in done.of_terms)]
    if alg.model_kind == "reward" or alg.value_lr is not None:
        loss, metrics = alg.value_loss(tables["values"][batch.labels], batch.tokens)
        found += [{"value loss": loss}, metrics]
    for metrics in found:
        yield from metrics.items()


def describe(alg: Algorithm) -> dict[str, Any]:
    step = made_up_step(alg)
    told: dict[str, Any] = {"accepted": sum(alg.accept_group(g) << n for n, g in enumerate(step.groups))}
    groups: list[Group] = compute_advantages(alg, step.groups, stale=True)
    samples = [s for g in groups for s in g]
    rows = [s.columns | ({} if s.advantage is None else {"advantage": s.advantage}) for s in samples]
    given = set[str]().union(*(s.columns for g in step.groups for s in g))
    for name in sorted({name for row in rows for name in row.keys() - given}):
        there = [row[name][s.loss_mask].ravel() for row, s in zip(rows, samples, strict=True) if name in row]
        told[f"column {name}"] = shorten(np.concatenate(there))
    [batch] = plan_batches(alg, groups, step.now)
    told |= {name: shorten(x.detach()) for name, x in list_metrics(alg, batch, step.now)}
    if alg.has_state:
        state = alg.after(make_up_step_seen(alg, step, 0)).state
        told |= {f"state {name}": shorten(value) for name, value in state.items()}
    return told


def describe_named(name: str) -> dict[str, Any]:
    algorithm, settings = ALGORITHMS[name]
    return describe(find_algorithm({"name": algorithm})[1](**NEEDED.get(algorithm, {}) | settings))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_numbers_of_the_made_up_step_are_as_they_were(name):
    """`python -m unit_tests.algs.test_made_up_numbers` writes them."""
    assert describe_named(name) == pytest.approx(json.loads(NUMBERS.read_text())[name], rel=1e-5, abs=1e-6)


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(describe_named(name))}" for name in ALGORITHMS]
    NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
