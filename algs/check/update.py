"""One update of an algorithm on a made-up step, and the comparison of two gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from algs.base import Algorithm, assign_advantages
from algs.check import fixtures as exhibit
from algs.check.fixtures import Tables, World
from core.types import Batch, Group, Policy, ScoredColumn
from data_feeds.packing import Plan, plan_update


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    max_tokens: int
    ranks: int
    padded: bool

    def __str__(self) -> str:
        return f"micro-batches of at most {self.max_tokens} tokens on {self.ranks} ranks"


HORIZON = 7
WHOLE = Cut(max_tokens=1000, ranks=1, padded=True)
CUTS = [
    Cut(max_tokens=20, ranks=1, padded=True),
    Cut(max_tokens=45, ranks=3, padded=False),
    Cut(max_tokens=40, ranks=17, padded=True),  # more ranks than samples: some of them stand idle
]
SAME = 1e-6
"""Of the largest gradient: two that are further apart differ. A loss may compute in float32 inside."""


class Broken(Exception):
    """An obligation does not hold: where, and by which numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one update computes."""

    loss: float
    gradient: Tables
    """By what is trained: for tables laid back onto samples, however they were packed."""
    connected: bool
    """False if backward() would raise, because the loss of a micro-batch does not depend on what is trained."""


def credited(alg: Algorithm, groups: list[Group], *, stale: bool) -> list[Group]:
    """What credit makes of the columns that are declared; stale: a step of several updates, so prox_logp is there."""
    return assign_advantages(
        alg, exhibit.shown(groups, alg.required_columns | frozenset[ScoredColumn]({"prox_logp"} if stale else ()))
    )


def batches_of(
    alg: Algorithm, groups: list[Group], tables: Tables, *, cut: Cut = WHOLE, horizon: int = HORIZON
) -> list[Batch]:
    """The micro-batches of all ranks, with totals."""
    plan = plan_of(alg, groups, cut=cut, horizon=horizon)
    return with_totals(alg, [batch for rank in plan.batches(torch.float64) for batch in rank], tables)


def plan_of(alg: Algorithm, groups: list[Group], *, cut: Cut = WHOLE, horizon: int = HORIZON) -> Plan:
    whole = alg.whole_groups
    size = cut.max_tokens * (2 if whole else 1)  # for it holds two answers
    return plan_update(
        groups,
        alg.loss_norm,
        size,
        ranks=cut.ranks,
        horizon=horizon,
        padded=cut.padded,
        whole_groups=whole,
    )


@torch.no_grad()
def with_totals(alg: Algorithm, batches: list[Batch], tables: Tables) -> list[Batch]:
    """As trainers/trainer.py adds them up."""
    if type(alg).totals is Algorithm.totals:
        return batches
    parts = [alg.totals(policy_on(alg, b, tables), b.tokens) for b in batches]
    totals = {name: torch.stack([p[name] for p in parts]).sum(0) for name in parts[0]}
    return [replace(b, tokens=b.tokens.replace(totals=totals)) for b in batches]


def policy_on(alg: Algorithm, batch: Batch, tables: Tables) -> Policy:
    at = batch.labels
    return Policy(logp=tables["logp"][at], entropy=tables["entropy"][at] if alg.needs_entropy else None)


def losses(alg: Algorithm, batch: Batch, tables: Tables) -> list[Tensor]:
    """What a trainer calls backward() on: the policy's loss, and the value model's if there is one."""
    if alg.model_kind == "reward":
        loss, metrics = alg.value_loss(tables["values"][batch.labels], batch.tokens)
    else:
        loss, metrics = alg.objective(policy_on(alg, batch, tables), batch.tokens)
    terms, per_token = [loss], {"the loss": loss, **metrics}
    if alg.value_lr is not None:
        value_loss, metrics = alg.value_loss(tables["values"][batch.labels], batch.tokens)
        terms, per_token = [loss, value_loss], per_token | {"the value loss": value_loss, **metrics}
    for name, value in per_token.items():
        if value.shape != batch.labels.shape:
            raise Broken(
                f"{name} has shape {list(value.shape)}, expected one value per learnt token, "
                f"{list(batch.labels.shape)}: return it unreduced, the framework weighs and adds up"
            )
    return [(term * batch.tokens.weight).sum() for term in terms]


def outcome(alg: Algorithm, batches: list[Batch], tables: Tables, *, by: Tables | None = None) -> Outcome:
    """One update: forward and backward of every micro-batch. `by` is what is trained, the tables if left out."""
    if by is None:
        by = tables = {name: t.detach().clone().requires_grad_() for name, t in tables.items()}
    gradient = {name: torch.zeros_like(t) for name, t in by.items()}
    loss, connected = 0.0, True
    for batch in batches:
        terms = losses(alg, batch, tables)
        total = torch.stack(terms).sum()
        loss, connected = loss + float(total.detach()), connected and all(term.requires_grad for term in terms)
        for name, g in gradient_of(total, by).items():
            gradient[name] += g
    return Outcome(loss=loss, gradient=gradient, connected=connected)


def gradient_of(total: Tensor, by: Tables) -> Tables:
    """Without the tables that it does not depend on."""
    if not total.requires_grad:
        return {}
    slopes = cast(Iterable[Tensor | None], torch.autograd.grad(total, list(by.values()), allow_unused=True))
    return {name: g for name, g in zip(by, slopes, strict=True) if g is not None}


def of_groups(alg: Algorithm, world: World, groups: list[Group], *, stale: bool, cut: Cut = WHOLE) -> Outcome:
    return outcome(alg, batches_of(alg, credited(alg, groups, stale=stale), world.now, cut=cut), world.now)


def size_of(gradient: Tables) -> float:
    return float(torch.stack([g.abs().max() for g in gradient.values()]).max()) if gradient else 0.0


def furthest(got: Tables, want: Tables) -> tuple[float, str, int]:
    """The largest difference, and the table and the token where it is."""
    gaps = {name: (g - want[name]).abs().nan_to_num(nan=math.inf) for name, g in got.items()}
    return max((float(gap.max()), name, int(gap.argmax())) for name, gap in gaps.items())


def difference(world: World, got: Tables, want: Tables) -> str:
    """Where two gradients are furthest apart; "" if they agree."""
    gap, name, token = furthest(got, want)
    if gap <= SAME * size_of(want) + 1e-15:
        return ""
    numbers = f"{got[name][token]:.4g} instead of {want[name][token]:.4g}"
    return f"the gradient by {name} at {world.where(token)} is {numbers}"


def when(stale: bool) -> str:
    return "several updates per step" if stale else "one update per step"


def any_difference(world: World, got: Outcome, want: Outcome) -> str:
    if got.loss == want.loss and all(torch.equal(got.gradient[name], g) for name, g in want.gradient.items()):
        return ""
    numbers = f"the loss is {got.loss:.6g} instead of {want.loss:.6g}"
    return difference(world, got.gradient, want.gradient) or numbers
