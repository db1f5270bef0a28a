"""Totals of an update: what `Algorithm.totals` asks for, reduced over micro-batches and ranks in stages.

    def totals(self, policy, tokens):
        t = yield {"n": count(x), "sum": exact_sum(x)}             a stage: a dict of reductions, by name
        yield {"cut": kth(x - t["sum"] / t["n"], fraction=0.2)}    a later stage may use earlier results

Every micro-batch has its own generator. All of them advance together, from a single forward pass per micro-batch. The
loss gets the results as `tokens.totals`, and as `tokens.first` the values of the first pass whose order statistics they
are: computed again, a value may differ in the last bit, and a token at the threshold would change sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from algs.base import Algorithm
from algs.reductions import INTEGERS, Collective, Reduction, Stage, Stages, reduce_parts
from algs.validate import Metrics, check_advantages
from core.errors import RunStopped, UserError
from core.types.samples import Group, Policy, Tokens

NEAR = 1e-5
"""Distance of a value from a threshold at which a rounding of the forward pass may decide."""


class Ranks(Protocol):
    """Rank among those that share an update."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def sum_over_rows(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, on every rank; integers are added exactly."""
        ...


class Alone:
    """Single rank."""

    rank, ranks = 0, 1

    def sum_over_rows(self, values: Tensor) -> Tensor:
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals of an update, with the compared values of one micro-batch."""

    reduced: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Result of each reduction: 0-d, or [n] for gather; the same in all micro-batches and ranks."""
    first: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """[M] each, values of order statistics and gathers in the first pass; NaN where a token did not count."""

    def add_to(self, tokens: Tokens) -> Tokens:
        return tokens.replace(totals=self.reduced, first=self.first) if self.reduced else tokens


def sum_totals(alg: Algorithm, seen: Iterable[tuple[Policy, Tokens]], group: Ranks) -> Iterable[Totals]:
    """Reduce the algorithm's totals over the micro-batches of an update and all ranks; return them per micro-batch.

    seen: policy and tokens of each micro-batch on this rank. Not read if the algorithm has no totals, and then the
    result has no end. All ranks make the same collectives, however many micro-batches they have.
    """
    if type(alg).totals is Algorithm.totals:
        return iter(Totals, None)  # without end
    collective = reduce_totals(alg, seen, rank=group.rank, ranks=group.ranks)
    try:
        part = next(collective)
        while True:
            part = collective.send(group.sum_over_rows(part))
    except StopIteration as done:
        return done.value


def total_alone(alg: Algorithm, policy: Policy, tokens: Tokens) -> Tokens:
    """Return the tokens of an update that is a single micro-batch, with totals."""
    return next(iter(sum_totals(alg, [(policy, tokens)], Alone()))).add_to(tokens)


def prepare_update(alg: Algorithm, groups: list[Group]) -> list[Group]:
    """Return the groups of an update as the algorithm prepares them. Raises RunStopped for other samples, or none."""
    if type(alg).prepare_update is Algorithm.prepare_update:
        return groups
    prepared = alg.prepare_update(groups)
    check_advantages(alg, groups, prepared, method="prepare_update")
    if not any(s.n_trained for g in prepared for s in g) and any(s.n_trained for g in groups for s in g):
        raise RunStopped(
            f"{type(alg).__name__}.prepare_update left no token to train on: keep one, or set advantages to 0"
        )
    return prepared


@torch.no_grad()
def reduce_totals(
    alg: Algorithm, seen: Iterable[tuple[Policy, Tokens]], *, rank: int, ranks: int
) -> Collective[list[Totals]]:
    """Run the stages of all micro-batches together; yield each part of a sum over the ranks."""
    # each to its first stage at once, so that only values per token outlive a forward pass
    running = [_MicroBatch(alg, policy, tokens) for policy, tokens in seen]
    reduced: dict[str, Tensor] = {}
    while (names := _agree_on_names(alg, running)) is not None:
        for name in names:
            if name in reduced:
                raise UserError(f"{type(alg).__name__}.totals asks for {name!r} in two stages: rename one of them")
            parts = [one.stage[name] for one in running if one.stage is not None]
            reduced[name] = yield from _reduce(alg, name, parts, rank=rank, ranks=ranks)
        for one in running:
            one.advance(reduced)
    return [Totals(reduced=reduced, first=one.first) for one in running]


class _MicroBatch:
    """Generator of a micro-batch, and the stage it asks for."""

    def __init__(self, alg: Algorithm, policy: Policy, tokens: Tokens):
        self.who, self.shape = f"{type(alg).__name__}.totals", tokens.weight.shape
        asked = alg.totals(policy, tokens)
        self.stages: Stages = _as_stages(asked) if isinstance(asked, Mapping) else asked
        self.first: dict[str, Tensor] = {}
        self.stage: Stage | None = self._check(next(self.stages, None))

    def advance(self, reduced: Mapping[str, Tensor]) -> None:
        """Send a copy of the results so far, and receive the next stage; None after the last."""
        try:
            self.stage = self._check(self.stages.send(dict(reduced)))
        except StopIteration:
            self.stage = None

    def _check(self, stage: Stage | None) -> Stage | None:
        for name, asked in (stage or {}).items():
            if not isinstance(asked, Reduction):
                continue
            if asked.values.shape != self.shape:
                raise UserError(
                    f"{self.who}: {name} has shape {list(asked.values.shape)}, expected one value per token, "
                    f"{list(self.shape)}: use `where` to leave tokens out"
                )
            if asked.keeps_values:
                if asked.values.dtype not in INTEGERS:
                    raise UserError(f"{self.who}: {name} has dtype {asked.values.dtype}, expected float32")
                self.first[name] = asked.compared
        return stage


def _as_stages(stage: Stage) -> Stages:
    yield stage


def _agree_on_names(alg: Algorithm, running: Sequence[_MicroBatch]) -> list[str] | None:
    """Return the names of the next stage, in the order in which all ranks reduce them; None after the last."""
    asked = {None if one.stage is None else tuple(sorted(one.stage)) for one in running}
    if len(asked) > 1:
        raise UserError(
            f"{type(alg).__name__}.totals asks for other reductions in one micro-batch than in another, "
            f"{' and '.join(map(str, asked))}: the stages must not depend on the tokens"
        )
    [names] = asked
    return None if names is None else [*names]


def _reduce(
    alg: Algorithm, name: str, parts: Sequence[Tensor | Reduction], *, rank: int, ranks: int
) -> Collective[Tensor]:
    asked = [part for part in parts if isinstance(part, Reduction)]
    rules = {part.rule for part in asked}
    if rules and (len(rules) > 1 or len(asked) < len(parts)):
        raise UserError(
            f"{type(alg).__name__}.totals: {name} is another reduction in one micro-batch than in another: it may "
            "depend on what was reduced before, and not on the tokens"
        )
    if asked:
        return (yield from reduce_parts(asked, rank=rank, ranks=ranks))
    return (yield torch.stack([part.detach() for part in parts if isinstance(part, Tensor)]).sum(0))


def measure_near(tokens: Tokens) -> Metrics:
    """Return 1 for tokens within NEAR of a threshold, otherwise 0, as the metric near_threshold; {} without any."""
    near = [
        (values - tokens.totals[name]).abs() <= NEAR
        for name, values in tokens.first.items()
        if not tokens.totals[name].dim()
    ]
    return {"near_threshold": torch.stack(near).any(0).to(tokens.weight.dtype)} if near else {}
