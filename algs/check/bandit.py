"""Obligation (f): the algorithm learns a bandit."""

from __future__ import annotations

import torch
from torch import Tensor

from algs.base import Algorithm
from algs.check import fixtures
from algs.check.fixtures import Tables
from algs.check.replay import see_step
from algs.check.update import ObligationFailed, compute_advantages, plan_batches, run_update
from core.types.samples import ScoredColumn

UPDATES, MIN_PROBABILITY, ENGINE_OFFSET = 40, 0.5, 0.4


def learns_a_bandit(alg: Algorithm) -> str:
    """Raise ObligationFailed unless the best arm's probability reaches MIN_PROBABILITY; return the numbers."""
    start, end = 1 / len(fixtures.ARM_REWARDS), train_bandit(alg, engine_offset=0.0)
    numbers = f"in {UPDATES} updates the best arm's probability went from {start:.2f} to {end:.2f}"
    if not end >= MIN_PROBABILITY:
        raise ObligationFailed(f"{numbers}, expected {MIN_PROBABILITY} or more")
    # reported only: a correction may rightly refuse to learn from an engine that is this far off
    off_policy = train_bandit(alg, engine_offset=ENGINE_OFFSET)
    return f"{numbers}; to {off_policy:.2f} with an engine {ENGINE_OFFSET} nats off and two updates per step"


def train_bandit(alg: Algorithm, *, engine_offset: float) -> float:
    """Train with plain SGD and return the final probability of the best arm.

    engine_offset: largest difference between the engine's and the policy's logits.
    """
    draw = torch.Generator().manual_seed(0)
    # all arms equally likely, so that what is learnt comes from the algorithm alone
    logits, value = torch.zeros(len(fixtures.ARM_REWARDS), dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    tilt = engine_offset * torch.linspace(1, -1, len(logits), dtype=torch.float64)
    # two updates per step with an offset: the second sees a policy that is not the proximal one
    start, per_step = logits.log_softmax(-1), 2 if engine_offset else 1
    for number in range(UPDATES // per_step):
        now = bandit_tables(logits, value)
        scored: dict[ScoredColumn, Tensor] = {
            "prox_logp": now["logp"],
            "ref_logp": start,
            "teacher_logp": fixtures.TEACHER,
        }
        scored["values"] = now["values"]
        scored = dict.fromkeys(alg.required_columns, fixtures.TEACHER) | scored
        # the engine samples from other logits, as one that rounds differently does
        groups = [g for g in fixtures.sample_bandit(logits + tilt, scored, draw) if alg.accept_group(g)]
        groups = compute_advantages(alg, groups, stale=per_step > 1)
        for _ in range(per_step if groups else 0):
            trained = {"logits": logits.clone().requires_grad_(), "value": value.clone().requires_grad_()}
            tables = bandit_tables(**trained)
            slopes = run_update(alg, plan_batches(alg, groups, tables, horizon=1), tables, by=trained).gradient
            logits, value = logits - slopes["logits"], value - 0.1 * slopes["value"]
        if groups and alg.has_state:
            alg = alg.after(see_step(alg, groups, now, number=number, horizon=1))
    return float(logits.softmax(-1)[fixtures.BEST])


def bandit_tables(logits: Tensor, value: Tensor) -> Tables:
    """Return logp, entropy and values of every arm, [arms] each: label k is arm k."""
    logp = logits.log_softmax(-1)
    return {"logp": logp, "entropy": -(logp.exp() * logp).sum().expand(len(logp)), "values": value.expand(len(logp))}
