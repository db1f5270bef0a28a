"""Obligation (f): the algorithm learns a bandit."""

from __future__ import annotations

import torch
from torch import Tensor

from algs.base import Algorithm
from algs.check import fixtures as exhibit
from algs.check.fixtures import Tables
from algs.check.update import (
    Broken,
    batches_of,
    credited,
    outcome,
)
from core.types import ScoredColumn

UPDATES, LEARNT, SLANT = 40, 0.5, 0.4


def learns_a_bandit(alg: Algorithm) -> str:
    start, end = 1 / len(exhibit.PAYOFF), bandit(alg, slant=0.0)
    numbers = f"in {UPDATES} updates the best arm's probability went from {start:.2f} to {end:.2f}"
    if not end >= LEARNT:
        raise Broken(f"{numbers}, expected {LEARNT} or more")
    # Told, not asked: a correction may rightly refuse to learn from such exhibit.
    return f"{numbers}; to {bandit(alg, slant=SLANT):.2f} with an engine {SLANT} nats off and two updates per step"


def bandit(alg: Algorithm, *, slant: float) -> float:
    """Probability of the best arm in the end, by plain SGD. The engine's logits are off by up to `slant`."""
    draw = torch.Generator().manual_seed(0)
    logits, value = torch.zeros(len(exhibit.PAYOFF), dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    tilt = slant * torch.linspace(1, -1, len(logits), dtype=torch.float64)
    start, per_step = logits.log_softmax(-1), 2 if slant else 1
    for _ in range(UPDATES // per_step):
        now = bandit_tables(logits, value)
        scored: dict[ScoredColumn, Tensor] = {
            "prox_logp": now["logp"],
            "ref_logp": start,
            "teacher_logp": exhibit.TEACHER,
        }
        scored["values"] = now["values"]
        groups = [g for g in exhibit.bandit_answers(logits + tilt, scored, draw) if alg.accept_group(g)]
        groups = credited(alg, groups, stale=per_step > 1)
        for _ in range(per_step if groups else 0):
            trained = {"logits": logits.clone().requires_grad_(), "value": value.clone().requires_grad_()}
            tables = bandit_tables(**trained)
            slopes = outcome(alg, batches_of(alg, groups, tables, horizon=1), tables, by=trained).gradient
            logits, value = logits - slopes["logits"], value - 0.1 * slopes["value"]
    return float(logits.softmax(-1)[exhibit.BEST])


def bandit_tables(logits: Tensor, value: Tensor) -> Tables:
    """[arms] each: label k of the bandit is arm k."""
    logp = logits.log_softmax(-1)
    return {"logp": logp, "entropy": -(logp.exp() * logp).sum().expand(len(logp)), "values": value.expand(len(logp))}
