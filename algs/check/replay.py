"""Obligation (n): a run that is stopped and resumed has the state of one that was not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from algs.base import Algorithm
from algs.check import fixtures
from algs.check.fixtures import MadeUpStep, Tables
from algs.check.update import (
    HORIZON,
    NotApplicable,
    ObligationFailed,
    compute_advantages,
    make_policy,
    plan_batches,
)
from algs.state import StepSeen
from algs.validate import check_per_token
from core.types.arrays import from_json, is_equal, to_json
from core.types.episodes import prepare_credit
from core.types.samples import Group

STEPS = 4


def replays_its_state(alg: Algorithm) -> str:
    """Check that next_state depends on the state and the step alone, and that JSON keeps the state."""
    if not alg.has_state:
        raise NotApplicable("it has no state")
    step, now, settings = fixtures.made_up_step(alg), alg, alg.model_dump()
    for number in range(STEPS):
        seen = make_up_step_seen(now, step, number)
        moved = now.after(seen)
        _expect_same(now.after(seen).state, moved.state, f"step {number}: next_state called twice")
        # as a resumed run makes it: from the settings and the state in a checkpoint
        loaded = from_json(json.loads(json.dumps(to_json(dict(now.state)))))
        resumed = type(alg).model_validate(settings).with_state(loaded, step=number)
        again = resumed.after(make_up_step_seen(resumed, step, number))
        _expect_same(again.state, moved.state, f"step {number}: resumed from a checkpoint before it")
        now = moved
    return f"{STEPS} steps, each of them twice and from a checkpoint: {', '.join(now.state)}"


def _expect_same(got: Mapping[str, Any], want: Mapping[str, Any], where: str) -> None:
    for name in [*want, *got]:
        if name not in got or name not in want or not is_equal(got[name], want[name]):
            raise ObligationFailed(
                f"{where}: the state's {name} is {got.get(name)} instead of {want.get(name)}: keep nothing outside of "
                "the state, and draw nothing at random"
            )


def make_up_step_seen(alg: Algorithm, step: MadeUpStep, number: int) -> StepSeen:
    """Return a finished made-up step; every step has other groups."""
    groups = [g for i, g in enumerate(step.groups) if i != number]
    return see_step(alg, compute_advantages(alg, groups, stale=number % 2 == 1), step.now, number=number)


def see_step(
    alg: Algorithm, groups: list[Group], tables: Tables, *, number: int = 0, horizon: int = HORIZON
) -> StepSeen:
    """Return what next_state sees of a step of one update. groups: with advantages."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for batch in plan_batches(alg, groups, tables, horizon=horizon):
        returned: list[object] = []
        if alg.model_kind != "reward":
            returned.append(alg.objective(make_policy(alg, batch, tables), batch.tokens))
        if alg.model_kind == "reward" or alg.value_lr is not None:
            returned.append(alg.value_loss(tables["values"][batch.labels], batch.tokens))
        for loss, metrics in (check_per_token(alg, each, batch.tokens) for each in returned):
            for name, values in {"loss": loss, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + float((values.detach() * batch.tokens.weight).sum())
                weights[name] = weights.get(name, 0.0) + float(batch.tokens.weight.sum())
    means = {name: total / weights[name] for name, total in sums.items() if weights[name]}
    return StepSeen(number=number, groups=prepare_credit(groups)[0], means=means)
