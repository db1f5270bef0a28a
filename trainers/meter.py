"""Metrics of a training step: averages of per-token values over micro-batches, updates and ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from algs.objective import Objective, add_terms
from core.errors import RunStopped
from trainers.observers import BatchSeen, Observer


class SharedNames:
    """Names of the values that ranks sum together: the same on every rank, in every step."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ranks = 1

    def check(self, names: Sequence[str], add_up: Callable[[Tensor], Tensor]) -> None:
        """Raise RunStopped if a rank has other names, since ranks that sum tensors of two lengths hang.

        The first names are compared over the ranks, later ones with the first on this rank. Collective the first time.
        """
        if not names:  # no rank made an update
            return
        odd: Sequence[str] = []
        if not self.names:
            mark = zlib.crc32("\n".join(names).encode()) >> 8
            # equal marks have n x (sum of squares) = (sum)^2; with 24 bits each, the sums of 2^15 ranks are exact
            self.ranks, marks, squares = add_up(torch.tensor([1, mark, mark**2])).tolist()
            self.names = [*names]
            odd = [] if self.ranks * squares == marks**2 else names
        elif self.ranks > 1:
            odd = sorted({*names} ^ {*self.names})
        if odd:
            raise RunStopped(
                f"ranks cannot average metrics that not all of them have (seen here: {', '.join(odd)}): let the loss "
                "return the same names for every micro-batch, whatever its tokens"
            )


@dataclass
class Meter:
    """Weighted averages of per-token values, over all added micro-batches and all ranks."""

    tokens: float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sum of weight x value and sum of weights by name, [2] float64."""

    @torch.no_grad()
    def add(self, weight: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add the values of M tokens, [M] each, with the weights of the tokens, [M]."""
        self.tokens += weight.numel()
        self._add_values(weight, values)

    @torch.no_grad()
    def add_objective(self, weight: Tensor, found: Objective) -> None:
        """Add the loss and the metrics of a micro-batch, averaged over its tokens or over those of each term."""
        self.add(weight, found.metrics if found.of_terms else {"loss": found.loss, **found.metrics})
        for own, values in found.of_terms:
            self._add_values(own, values)

    def _add_values(self, weight: Tensor, values: Mapping[str, Tensor]) -> None:
        weight = weight.double()
        for name, value in values.items():
            self._add_sums(name, torch.stack([(value.detach().double() * weight).sum(), weight.sum()]))

    def merge(self, other: Meter) -> None:
        self.tokens += other.tokens
        for name, pair in other.sums.items():
            self._add_sums(name, pair)

    def compute_means(self, add_up: Callable[[Tensor], Tensor], shared: SharedNames | None = None) -> dict[str, float]:
        """Return the means over all ranks; a value that was never added has no mean.

        add_up: sums a tensor over the ranks. shared: names of earlier calls.
        """
        names = sorted(self.sums)
        (shared or SharedNames()).check(names, add_up)
        pairs = [self.sums[n] for n in names]
        # The second column is filler. It goes to the sums, and all are read at once: a GPU is waited for a single time.
        count = torch.tensor([self.tokens, 1.0], dtype=torch.float64, device=pairs[0].device if pairs else "cpu")
        (tokens, _), *sums = add_up(torch.stack([count, *pairs])).tolist()
        means = {n: total / weight for n, (total, weight) in zip(names, sums, strict=True) if weight}
        return {"tokens": tokens, **add_terms(means)}

    def _add_sums(self, name: str, pair: Tensor) -> None:
        self.sums[name] = self.sums[name] + pair if name in self.sums else pair


class Rank(Protocol):
    """Interface of a trainer rank that sums values over all ranks."""

    def sum_over_rows(self, values: Tensor) -> Tensor: ...


class StepMetrics(Observer):
    """Averages of loss, metrics and gradient norms over the updates of a step that were made."""

    def __init__(self, rank: Rank):
        self.rank, self.names = rank, SharedNames()

    def begin_step(self) -> None:
        self.total = Meter()
        self.norms: list[Mapping[str, float]] = []
        self.skipped = 0

    def begin_update(self) -> None:
        self.update = Meter()

    def on_batch(self, seen: BatchSeen) -> None:
        self.update.add_objective(seen.batch.tokens.weight, seen.objective)

    def on_update(self, norms: Mapping[str, float]) -> None:
        if not norms:  # its loss may be infinite
            self.skipped += 1
            return
        self.total.merge(self.update)
        self.norms.append(norms)

    def finish(self) -> dict[str, float]:
        norms = self.norms
        return {
            **self.total.compute_means(self.rank.sum_over_rows, self.names),
            **({name: sum(n[name] for n in norms) / len(norms) for name in norms[0]} if norms else {}),
            "updates_skipped": float(self.skipped),
        }


class SourceLosses(Observer):
    """Averages of the loss over the tokens of each source, over the updates of a step that were made."""

    def __init__(self, rank: Rank, *, sources: tuple[str, ...]):
        self.rank, self.sources, self.names = rank, sources, SharedNames()

    def begin_step(self) -> None:
        self.total = Meter()

    def begin_update(self) -> None:
        self.update = Meter()

    def on_batch(self, seen: BatchSeen) -> None:
        tokens = seen.batch.tokens
        for i, source in enumerate(self.sources):
            # tokens of other sources get weight 0, so that the mean is that of the source
            self.update.add(tokens.weight * (tokens.source_ids == i), {f"loss/{source}": seen.objective.loss})

    def on_update(self, norms: Mapping[str, float]) -> None:
        if norms:
            self.total.merge(self.update)

    def finish(self) -> dict[str, float]:
        means = self.total.compute_means(self.rank.sum_over_rows, self.names)
        return {name: value for name, value in means.items() if name != "tokens"}
