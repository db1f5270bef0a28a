"""The loss of each data set of a mixture, averaged by itself."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.meter import Meter, Rank
from trainers.observers import BatchSeen, Observer


class SourceLosses(Observer):
    """Averages of the loss over the tokens of each source, over the updates of a step that were made."""

    def __init__(self, rank: Rank, *, sources: tuple[str, ...]):
        self.rank, self.sources = rank, sources

    def begin_step(self) -> None:
        self.total = Meter()

    def begin_update(self) -> None:
        self.update = Meter()

    def on_batch(self, seen: BatchSeen) -> None:
        tokens = seen.batch.tokens
        for i, source in enumerate(self.sources):
            self.update.add(tokens.weight * (tokens.source_ids == i), {f"loss/{source}": seen.loss})

    def on_update(self, norms: Mapping[str, float]) -> None:
        if norms:
            self.total.merge(self.update)

    def finish(self) -> dict[str, float]:
        means = self.total.compute_means(self.rank.sum_over_rows)
        return {name: value for name, value in means.items() if name != "tokens"}
