"""Obligation (m): totals and every token's coefficient are equal to the bit in any partition of the rows, on any ranks.

Given the same values per token, a split must not change a bit: neither of a reduced number, nor of the derivative of
the weighted loss by a token's log-probability. Only the sum of the tokens' gradients may round.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from algs.base import Algorithm
from algs.check import fixtures
from algs.check.distributions import NOW
from algs.check.fixtures import MadeUpStep, Tables
from algs.check.update import (
    SPLITS,
    WHOLE,
    ObligationFailed,
    compute_advantages,
    describe_updates,
    make_plan,
    make_policy,
    plan_batches,
    run_update,
)
from algs.reductions import Collective
from algs.totals import Totals, reduce_totals
from core.types.samples import Batch, Group
from data_feeds.packing.batches import Plan

T = TypeVar("T")
Part = tuple[int, ...]
"""Rows of a micro-batch, by number."""
ROWS, DRAWN, RANKS = 8, 8, (1, 2, 4)
CLOSE = 1e-12
"""Tolerance of sums over tokens."""


def changes_no_bit(alg: Algorithm, *, drawn: int | None = DRAWN) -> str:
    """Compare totals, coefficients and gradients over partitions of the rows; drawn: how many, None: all of them."""
    step, told, exact = fixtures.made_up_step(alg), list[str](), True
    for stale, shared in ((True, False), (False, True)):
        groups = compute_advantages(alg, step.groups, stale=stale)
        where = describe_updates(stale)
        cut = _Rows(
            alg, step, make_plan(alg, keep_rows(alg, groups), split=replace(WHOLE, padded=False, shared=shared))
        )
        partitions = draw_partitions(len(cut.units), drawn)
        for partition in partitions:
            cut.compare(partition, f"{where}, micro-batches of the rows {partition}")
        exact = exact and cut.is_exact
        told.append(f"{len(partitions)} partitions of {len(cut.units)} rows")
        expect_equal_splits(alg, step, groups, where, tolerance=0.0 if cut.is_exact else 1e-10)
    if exact:
        return f"{' and '.join(told)} on {', '.join(map(str, RANKS))} ranks, {2 * len(SPLITS)} splits and orders: equal"
    return f"{' and '.join(told)}: equal but for plain sums in totals, which exact_sum would make exact"


def keep_rows(alg: Algorithm, groups: list[Group]) -> list[Group]:
    """Return groups of at most ROWS units that may not be split: whole groups, or single samples."""
    kept: list[Group] = []
    left = ROWS
    for group in groups:
        own = group if alg.whole_groups else [s for s in group if s.n_trained][:left]
        if own and left > 0:
            kept.append(own)
            left -= 1 if alg.whole_groups else len(own)
    return kept


def list_partitions(n: int) -> Iterator[list[Part]]:
    """Yield every partition of n rows into parts; 4140 for 8 rows."""
    if not n:
        yield []
        return
    for rest in list_partitions(n - 1):
        for i, part in enumerate(rest):
            yield [*rest[:i], (*part, n - 1), *rest[i + 1 :]]
        yield [*rest, (n - 1,)]


def draw_partitions(n: int, drawn: int | None) -> list[list[Part]]:
    """Return all partitions in a fixed random order, or the first `drawn` of them."""
    every = list(list_partitions(n))
    random.Random(0).shuffle(every)
    return every[:drawn]


@dataclass
class _Rows:
    """Rows of an update, and the numbers of each part of them."""

    alg: Algorithm
    step: MadeUpStep
    plan: Plan
    coefficients: dict[Part, Tables] = field(default_factory=dict[Part, Tables])
    first: dict[Part, dict[str, Tensor]] = field(default_factory=dict[Part, dict[str, Tensor]])
    batches: dict[Part, Batch] = field(default_factory=dict[Part, Batch])
    is_exact: bool = True
    """False if a total was a plain sum."""

    @cached_property
    def units(self) -> list[list[int]]:
        """Samples of each row that must stay together."""
        of = self.plan.groups or self.plan.episodes
        return [[i for i, n in enumerate(of) if n == unit] for unit in dict.fromkeys(of)]

    @cached_property
    def whole(self) -> Part:
        return tuple(range(len(self.units)))

    @cached_property
    def totals(self) -> Totals:
        """Totals of the rows in one piece."""
        if type(self.alg).totals is Algorithm.totals:
            return Totals()
        [whole] = self.reduce([self.whole], ranks=1)
        return whole

    @cached_property
    def features(self) -> Tensor:
        """Derivatives of each token's values by seven made-up parameters, [tokens, 7]."""
        draw = torch.Generator().manual_seed(1)
        return torch.randn(len(self.step.now["logp"]), 7, generator=draw, dtype=torch.float64)

    def batch(self, part: Part) -> Batch:
        if part not in self.batches:
            chosen = [i for unit in part for i in self.units[unit]]
            [[packed]] = replace(self.plan, bins=[[chosen]]).batches(torch.float64)
            self.batches[part] = packed.to("cpu")
        return self.batches[part]

    def reduce(self, partition: Sequence[Part], *, ranks: int) -> list[Totals]:
        """Reduce the totals with the parts dealt to ranks in turn; return them by part."""
        of_ranks = [partition[rank::ranks] or [()] for rank in range(ranks)]
        seen = [[self.batch(part) for part in own] for own in of_ranks]
        collectives = [
            reduce_totals(
                self.alg, [(make_policy(self.alg, b, self.step.now), b.tokens) for b in own], rank=rank, ranks=ranks
            )
            for rank, own in enumerate(seen)
        ]
        done = run_in_lock_step(collectives)
        by_part = {
            part: totals
            for own, results in zip(of_ranks, done, strict=True)
            for part, totals in zip(own, results, strict=True)
        }
        return [by_part[part] for part in partition]

    def compare(self, partition: Sequence[Part], where: str) -> None:
        """Raise ObligationFailed if a number differs from that of the rows in one piece."""
        for ranks in RANKS if type(self.alg).totals is not Algorithm.totals else ():
            for totals, part in zip(self.reduce(partition, ranks=ranks), partition, strict=True):
                self.compare_totals(totals, part, f"{where} on {ranks} ranks")
        for part in partition:
            self.compare_coefficients(part, where)
        got = sum((self.project(part) for part in partition), torch.zeros(7, dtype=torch.float64))
        gap = float((got - self.project(self.whole)).abs().max())
        size = float(sum(t.abs().sum() for t in self.coefficients[self.whole].values()))
        if not gap <= CLOSE * size:
            raise ObligationFailed(f"{where}: the gradient is {gap / size:.1g} of its size from that in one piece")

    def compare_totals(self, totals: Totals, part: Part, where: str) -> None:
        for name, value in totals.reduced.items():
            want = self.totals.reduced[name]
            if value.requires_grad:
                raise ObligationFailed(f"{where}: the total {name} carries a gradient: detach it")
            if same_bits(value, want):
                continue
            if not torch.allclose(value.double(), want.double(), rtol=CLOSE, atol=0):
                raise ObligationFailed(f"{where}: the total {name} is {value} instead of {want} in one piece")
            self.is_exact = False
        for name, values in totals.first.items():
            known = self.first.setdefault(part, totals.first)[name]
            if not same_bits(values, known):
                raise ObligationFailed(
                    f"{where}: the values of {name} in the first pass differ from another partition: add with "
                    "exact_sum what a threshold depends on"
                )

    def compare_coefficients(self, part: Part, where: str) -> None:
        for name, got in self.differentiate(part).items():
            at, want = self.batch(part).labels, self.differentiate(self.whole)[name]
            # a measure is computed again for each part, by kernels that round as they vectorise
            gap = CLOSE * float(want.abs().max()) if name == NOW else 0.0
            if not same_bits(got[at], want[at]) and not float((got[at] - want[at]).abs().max()) <= gap:
                want = torch.zeros_like(got).index_copy(0, at, want[at])
                raise ObligationFailed(f"{where}: {describe_slopes(self.step, name, got, want)}")

    def differentiate(self, part: Part) -> Tables:
        """Return the derivatives of the part's weighted loss, by table; a token is in one row only."""
        if part not in self.coefficients:
            batch = self.batch(part)
            first = self.totals.first if part == self.whole else self.first.get(part, {})
            tokens = Totals(reduced=self.totals.reduced, first=first).add_to(batch.tokens)
            outcome = run_update(self.alg, [replace(batch, tokens=tokens)], self.step.now)
            self.coefficients[part] = outcome.gradient
        return self.coefficients[part]

    def project(self, part: Part) -> Tensor:
        """Return the gradient by the made-up parameters, [7]."""
        at = self.batch(part).labels
        # the numbers of a token, if they are several, with weights of their own
        tables = (t[at].view(len(at), -1) for t in self.differentiate(part).values())
        of_tokens = (t @ torch.arange(1, t.shape[-1] + 1, dtype=t.dtype) for t in tables)
        return sum((self.features[at].T @ values for values in of_tokens), torch.zeros(()))


def expect_equal_splits(alg: Algorithm, step: MadeUpStep, groups: list[Group], where: str, *, tolerance: float) -> None:
    """Raise ObligationFailed if a token's coefficient differs in a split or order of the step as training makes it."""
    want = run_update(alg, plan_batches(alg, groups, step.now), step.now).gradient
    for seed, split in enumerate(SPLITS):
        batches = plan_batches(alg, fixtures.shuffle_groups(groups, seed), step.now, split=split)
        for name, got in run_update(alg, batches, step.now).gradient.items():
            bound = max(tolerance, CLOSE if name == NOW else 0.0)
            if not float((got - want[name]).abs().max()) <= bound * float(want[name].abs().max()):
                raise ObligationFailed(f"{where}, {split}: {describe_slopes(step, name, got, want[name])}")


def describe_slopes(step: MadeUpStep, name: str, got: Tensor, want: Tensor) -> str:
    """Describe the largest difference of two derivatives, at all digits."""
    at = int((got - want).abs().argmax())  # of a token, or of one of its logits
    numbers = f"{float(got.flatten()[at])!r} instead of {float(want.flatten()[at])!r} in one piece"
    return f"the derivative by {name} at {step.locate_token(at * len(got) // got.numel())} is {numbers}"


def run_in_lock_step(collectives: Sequence[Collective[T]]) -> list[T]:
    """Run the collectives of all ranks; return their results. Raises ObligationFailed if two ranks disagree."""
    done: dict[int, T] = {}
    total: Tensor | None = None
    while True:
        parts: list[Tensor] = []
        for rank, one in enumerate(collectives):
            try:
                parts.append(next(one) if total is None else one.send(total.clone()))
            except StopIteration as end:
                done[rank] = end.value
        if done:
            break
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            shapes = ", ".join(f"{list(part.shape)} {part.dtype}" for part in parts)
            raise ObligationFailed(f"the ranks reduce different tensors at the same time: {shapes}")
        total = torch.stack(parts).sum(0)
    if len(done) < len(collectives):
        raise ObligationFailed("some ranks have reduced all totals, and others have not: they would wait for ever")
    return [done[rank] for rank in range(len(collectives))]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
