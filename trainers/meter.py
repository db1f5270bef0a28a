"""Average per-token values over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.types.samples import Tokens


@dataclass
class Meter:
    """Weighted averages of per-token values, over all added micro-batches and all ranks."""

    sources: tuple[str, ...] = ()
    """Data sets whose losses are averaged separately."""
    tokens: float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sum of weight x value and sum of weights by name, [2] float64."""

    @torch.no_grad()
    def add(self, tokens: Tokens, values: dict[str, Tensor]) -> None:
        self.tokens += tokens.weight.numel()
        weight = tokens.weight.double()
        for name, value in values.items():
            self._add_sums(name, torch.stack([(value.detach().double() * weight).sum(), weight.sum()]))
        for i, source in enumerate(self.sources):
            assert tokens.source_ids is not None
            of_source = weight * (tokens.source_ids == i)
            loss = (values["loss"].detach().double() * of_source).sum()
            self._add_sums(f"loss/{source}", torch.stack([loss, of_source.sum()]))

    def merge(self, other: Meter) -> None:
        self.tokens += other.tokens
        for name, pair in other.sums.items():
            self._add_sums(name, pair)

    def compute_means(self, add_up: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the means over all ranks; a value that was never added has no mean.

        add_up: sums a tensor over the ranks.
        """
        names = sorted(self.sums)
        local = torch.stack(
            [torch.tensor([self.tokens, 1.0], dtype=torch.float64), *(self.sums[n].cpu() for n in names)]
        )
        (tokens, _), *sums = add_up(local).tolist()
        return {
            "tokens": tokens,
            **{n: total / weight for n, (total, weight) in zip(names, sums, strict=True) if weight},
        }

    def _add_sums(self, name: str, pair: Tensor) -> None:
        self.sums[name] = self.sums[name] + pair if name in self.sums else pair
