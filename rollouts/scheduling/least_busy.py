"""Groups that each engine process works on, and the engine with the fewest: in a moment, also among a thousand."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

Process = tuple[int, int]
"""Rank of an engine, and the processes that it has had before."""


class GroupCounts:
    """Count the groups of every engine process. A group that timed out stays counted, so that engine gets fewer.

    The engines that may be asked are in a heap of (groups, rank). An entry whose number is out of date is dropped when
    it comes to the top; every change of a number adds an entry.
    """

    def __init__(self) -> None:
        self.groups: Counter[Process] = Counter()
        self._serving: dict[int, Process] = {}
        """Process of every engine that may be asked, by rank."""
        self._heap: list[tuple[int, int]] = []

    def set_serving(self, processes: Sequence[Process]) -> None:
        """Set which processes may be asked."""
        self._serving = {process[0]: process for process in processes}
        self._heap = [(self.groups[process], process[0]) for process in processes]
        heapq.heapify(self._heap)

    def begin_group(self, process: Process) -> None:
        self._change(process, 1)

    def end_group(self, process: Process) -> None:
        self._change(process, -1)

    def find_least_busy(self, besides: int | None = None) -> int:
        """Return the rank with the fewest groups, the lowest one of several; `besides` only where it is the only one.

        At least one process must serve.
        """
        if besides is None:
            while not self._is_current(self._heap[0]):
                heapq.heappop(self._heap)
            return self._heap[0][1]
        others = [process for rank, process in self._serving.items() if rank != besides]
        return min(others or self._serving.values(), key=lambda process: (self.groups[process], process[0]))[0]

    def _change(self, process: Process, by: int) -> None:
        self.groups[process] += by
        rank = process[0]
        if self._serving.get(rank) != process:
            return
        heapq.heappush(self._heap, (self.groups[process], rank))
        if len(self._heap) > 8 * len(self._serving) + 64:  # out of date for the most part
            self.set_serving([*self._serving.values()])

    def _is_current(self, entry: tuple[int, int]) -> bool:
        groups, rank = entry
        return self.groups[self._serving[rank]] == groups
