"""Metrics of the routers of a mixture of experts (`rollout.router_replay`)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from modeling.route_counts import RouteReplay
from modeling.sequence_parallel import SequenceGroup
from trainers.observers import Observer


class Rank(Protocol):
    """Trainer rank whose policy has routers."""

    routes: RouteReplay | None
    sequence_group: SequenceGroup | None

    def sum_over_rows(self, values: Tensor) -> Tensor: ...


class RouteMetrics(Observer):
    """Counts of the routers' choices, over the micro-batches of a step."""

    def __init__(self, rank: Rank):
        self.rank = rank

    def begin_step(self) -> None:
        if self.rank.routes is not None:
            self.rank.routes.clear()

    def finish(self) -> dict[str, float]:
        routes, group = self.rank.routes, self.rank.sequence_group
        if routes is None:
            return {}
        counted = routes.counts.flatten()
        # each rank of a sequence group counted its slice of the rows
        counted = counted if group is None else group.sum(counted)
        return routes.counts.read(self.rank.sum_over_rows(counted))
