"""Obligation (p): the terms of an objective do not touch each other."""

from __future__ import annotations

import math

import torch

from algs.base import Algorithm
from algs.check import fixtures
from algs.check.fixtures import MadeUpStep
from algs.check.instruments import with_terms
from algs.check.update import (
    ObligationFailed,
    Outcome,
    compute_advantages,
    describe_any_difference,
    describe_difference,
    describe_updates,
    plan_batches,
    run_update,
)
from core.types.samples import Group
from core.types.terms import find_term_tokens


def keeps_its_terms_apart(alg: Algorithm) -> str:
    """Check that the gradient is the sum of the terms' own, and that no term reads a token of another one.

    A term alone has no tokens of others, so tokens added to one term cannot change the gradient of another.
    """
    step, told = fixtures.made_up_step(alg), list[str]()
    for stale in (False, True):
        groups = compute_advantages(alg, step.groups, stale=stale)
        whole, parts = run(alg, step, groups), list[Outcome]()
        for term in alg.terms:
            alone = with_terms(alg, (term,))
            parts.append(run(alone, step, groups))
            where = f"{describe_updates(stale)}, term {term.name}"
            _expect_own_tokens_only(alone, step, groups, parts[-1], where)
        added = {name: torch.stack([p.gradient[name] for p in parts]).sum(0) for name in whole.gradient}
        if said := describe_difference(step, added, whole.gradient):
            raise ObligationFailed(f"{describe_updates(stale)}: {said} of all terms together")
    for term in alg.terms:
        n = sum(int(find_term_tokens(s, term.on, term.sources).sum()) for g in step.groups for s in g)
        told.append(f"{term.name} on {n} tokens")
    return f"{', '.join(told)}: each alone adds up to the whole, and poison at the other tokens changes no bit"


def run(alg: Algorithm, step: MadeUpStep, groups: list[Group]) -> Outcome:
    return run_update(alg, plan_batches(alg, groups, step.now), step.now)


def _expect_own_tokens_only(alone: Algorithm, step: MadeUpStep, groups: list[Group], want: Outcome, where: str) -> None:
    """Poison the columns of all tokens outside a term; loss and gradient must stay equal to the last bit."""
    [term] = alone.terms
    names = [n for n in fixtures.POISONABLE_COLUMNS if fixtures.has_column(groups[0][0], n)]
    for name in names:
        for bad in (math.nan, 1e6):
            spoilt = fixtures.poison_column(
                groups, name, bad, keep=lambda s: find_term_tokens(s, term.on, term.sources)
            )
            if said := describe_any_difference(step, run(alone, step, spoilt), want):
                raise ObligationFailed(f"{where}: {bad:g} in {name} outside of its tokens: {said}")
