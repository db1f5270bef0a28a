"""Update of an algorithm on a made-up step, and comparison of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from algs.base import Algorithm, assign_advantages
from algs.check import fixtures
from algs.check.distributions import draw_distributions, measure_columns, measure_policy
from algs.check.fixtures import MadeUpStep, Tables
from algs.objective import add_totals, compute_objective, view_first
from algs.totals import Alone, prepare_update, sum_totals
from algs.validate import check_per_token
from core.types.samples import Batch, Group, Policy, ScoredColumn
from data_feeds.packing.batches import Plan, plan_update


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Split of a step into micro-batches."""

    max_tokens: int
    ranks: int
    padded: bool
    shared: bool = False
    """True: a common prefix of a group's samples is computed once."""

    def __str__(self) -> str:
        how = " with shared prefixes" if self.shared else ""
        return f"micro-batches of at most {self.max_tokens} tokens on {self.ranks} ranks{how}"


HORIZON = 7
WHOLE = Split(max_tokens=1000, ranks=1, padded=True)
SPLITS = [
    Split(max_tokens=20, ranks=1, padded=True),
    Split(max_tokens=45, ranks=3, padded=False),
    Split(max_tokens=30, ranks=2, padded=False, shared=True),
    Split(max_tokens=40, ranks=17, padded=True),  # more ranks than samples: some of them are idle
]
SAME = 1e-6
"""Tolerance, as a fraction of the largest gradient. A loss may compute in float32 internally."""


class ObligationFailed(Exception):
    """Obligation that does not hold, with place and numbers."""


class NotApplicable(Exception):
    """Reason why an obligation does not apply to this algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Loss and gradient of an update."""

    loss: float
    gradient: Tables
    """Gradient by trained tensor; tables are indexed by token id, so that packing has no influence."""
    connected: bool
    """False if backward() would raise, because a micro-batch's loss does not depend on any trained tensor."""


def compute_advantages(alg: Algorithm, groups: list[Group], *, stale: bool) -> list[Group]:
    """Compute advantages from declared columns only; stale: several updates per step, so prox_logp is present."""
    return assign_advantages(
        alg,
        fixtures.keep_columns(groups, alg.required_columns | frozenset[ScoredColumn]({"prox_logp"} if stale else ())),
    )


def plan_batches(
    alg: Algorithm, groups: list[Group], tables: Tables, *, split: Split = WHOLE, horizon: int = HORIZON
) -> list[Batch]:
    """Return the micro-batches of all ranks, with totals."""
    plan = make_plan(alg, groups, split=split, horizon=horizon)
    return with_totals(alg, [batch.to("cpu") for rank in plan.batches(torch.float64) for batch in rank], tables)


def make_plan(alg: Algorithm, groups: list[Group], *, split: Split = WHOLE, horizon: int = HORIZON) -> Plan:
    whole = alg.whole_groups
    size = split.max_tokens * (2 if whole else 1)  # a whole group holds two completions
    return plan_update(
        prepare_update(alg, groups),
        alg.loss_norm,
        size,
        ranks=split.ranks,
        horizon=horizon,
        padded=split.padded,
        share_prefixes=split.shared,
        whole_groups=whole,
        whole_episodes=alg.whole_episodes,
        terms=alg.terms,
    )


def with_totals(alg: Algorithm, batches: list[Batch], tables: Tables) -> list[Batch]:
    """Add the algorithm's totals to every micro-batch, summed as in training."""
    totals = sum_totals(alg, [view_first(make_policy(alg, b, tables), b) for b in batches], Alone())
    return [add_totals(b, own) for b, own in zip(batches, totals, strict=False)]


def make_policy(alg: Algorithm, batch: Batch, tables: Tables) -> Policy:
    return measure_policy(alg, batch.tokens, batch.labels, tables)


def compute_losses(alg: Algorithm, batch: Batch, tables: Tables) -> list[Tensor]:
    """Return the scalars for backward(): the policy's loss, and the value model's if there is one."""
    losses: list[Tensor] = []
    if alg.model_kind != "reward":
        losses.append(compute_objective(alg, make_policy(alg, batch, tables), batch).loss)
    if alg.model_kind == "reward" or alg.value_lr is not None:
        returned = alg.value_loss(tables["values"][batch.labels], batch.tokens)
        losses.append(check_per_token(alg, returned, batch.tokens)[0])  # as in training
    return [(loss * batch.tokens.weight).sum() for loss in losses]


def run_update(alg: Algorithm, batches: list[Batch], tables: Tables, *, by: Tables | None = None) -> Outcome:
    """Run forward and backward of every micro-batch. by: trained tensors, by default the tables."""
    if by is None:
        by = tables = {name: t.detach().clone().requires_grad_() for name, t in tables.items()}
    gradient = {name: torch.zeros_like(t) for name, t in by.items()}
    loss, connected = 0.0, True
    for batch in batches:
        terms = compute_losses(alg, batch, tables)
        total = torch.stack(terms).sum()
        loss, connected = loss + float(total.detach()), connected and all(term.requires_grad for term in terms)
        for name, g in compute_gradient(total, by).items():
            gradient[name] += g
    return Outcome(loss=loss, gradient=gradient, connected=connected)


def compute_gradient(total: Tensor, by: Tables) -> Tables:
    """Return the gradient by each table that `total` depends on."""
    if not total.requires_grad:
        return {}
    # a loss need not depend on every table, such as the values
    slopes = cast(Iterable[Tensor | None], torch.autograd.grad(total, list(by.values()), allow_unused=True))
    return {name: g for name, g in zip(by, slopes, strict=True) if g is not None}


def update_on_groups(
    alg: Algorithm, step: MadeUpStep, groups: list[Group], *, stale: bool, split: Split = WHOLE
) -> Outcome:
    return run_update(
        alg, plan_batches(alg, compute_advantages(alg, groups, stale=stale), step.now, split=split), step.now
    )


def max_abs(gradient: Tables) -> float:
    return float(torch.stack([g.abs().max() for g in gradient.values()]).max()) if gradient else 0.0


def find_largest_difference(got: Tables, want: Tables) -> tuple[float, str, int]:
    """Return the largest difference, with table and token."""
    # NaN counts as infinitely far, or max() could pass over it
    gaps = {name: (g - want[name]).abs().nan_to_num(nan=math.inf).view(len(g), -1) for name, g in got.items()}
    return max((float(gap.max()), name, int(gap.amax(-1).argmax())) for name, gap in gaps.items())


def describe_difference(step: MadeUpStep, got: Tables, want: Tables) -> str:
    """Describe the largest difference of two gradients; "" if they agree."""
    gap, name, token = find_largest_difference(got, want)
    # the constant is for a gradient of exactly 0, of which no share allows any rounding
    if gap <= SAME * max_abs(want) + 1e-15:
        return ""
    one, other = got[name][token].flatten(), want[name][token].flatten()
    column = int((one - other).abs().argmax())  # 0, but for a table of logits
    numbers = f"{one[column]:.4g} instead of {other[column]:.4g}"
    return f"the gradient by {name} at {step.locate_token(token)} is {numbers}"


def describe_updates(stale: bool) -> str:
    return "several updates per step" if stale else "one update per step"


def describe_any_difference(step: MadeUpStep, got: Outcome, want: Outcome) -> str:
    if got.loss == want.loss and all(torch.equal(got.gradient[name], g) for name, g in want.gradient.items()):
        return ""
    numbers = f"the loss is {got.loss:.6g} instead of {want.loss:.6g}"
    return describe_difference(step, got.gradient, want.gradient) or numbers


def slopes_by_ratio(
    alg: Algorithm,
    log_ratios: Tensor,
    advantages: Sequence[float],
    *,
    engine_gap: float = 0.0,
    totals_of: Algorithm | None = None,
) -> Tensor:
    """Return gradient / weight by ratio to the proximal policy and advantage, [R, A].

    engine_gap: log(pi_prox / pi_rollout) of every token. totals_of: algorithm whose totals are used, if another.
    """
    groups, logp = fixtures.ratio_arms(log_ratios, advantages, engine_gap=engine_gap)
    tables = {"logp": logp, "entropy": torch.ones_like(logp), "values": torch.zeros_like(logp)}
    tables |= draw_distributions(len(logp))
    measured = measure_columns(alg, tables)
    groups = [[fixtures.with_columns(s, measured) for s in g] for g in groups]
    [batch] = plan_batches(totals_of or alg, fixtures.add_own_columns(alg, groups), tables)
    slopes = run_update(alg, [batch], tables).gradient["logp"] / batch.tokens.weight[0]
    return slopes.view(len(log_ratios), len(advantages))
