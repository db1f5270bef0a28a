"""Bin packing of sequences into micro-batches and ranks. It affects memory and speed, never the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from core.errors import RunStopped
from data_feeds.packing.prefix_tree import gather_families

COST_IS_SQUARE_AT = 12_288
"""Sequence length at which attention costs as much as everything else; see estimate_cost."""


SAMPLE_TOO_LARGE = "a sequence of {} tokens does not fit trainer.micro_batch_tokens={}: raise it"


class TooLarge(ValueError):
    """Error of a unit that exceeds the micro-batch budget."""

    def __init__(self, tokens: int, max_tokens: int):
        super().__init__(SAMPLE_TOO_LARGE.format(tokens, max_tokens))
        self.tokens = tokens


@overload
def estimate_cost(n: int) -> float: ...
@overload
def estimate_cost(n: NDArray[np.int64]) -> NDArray[np.floating[Any]]: ...
def estimate_cost(n: int | NDArray[np.int64]) -> float | NDArray[np.floating[Any]]:
    """Estimate the cost of a sequence of n tokens, in tokens: n + n^2 / 12288.

    A layer of width d spends about 24 d^2 operations per token outside attention and, causally, 2 n d inside it. The
    ratio is n / 12 d; d = 1024 is assumed for every model. The square is negligible for short sequences. Among long
    sequences, it makes a sequence of 2n tokens cost more than two of n.
    """
    return n + n * n / COST_IS_SQUARE_AT


def pack_units(
    lengths: Sequence[int], units: Sequence[int], max_tokens: int, *, ranks: int, padded: bool
) -> list[list[int]]:
    """Pack samples of these lengths into micro-batches, each unit whole. Return their indices."""
    members = gather_families(range(len(lengths)), units)
    of_units = [[lengths[i] for i in unit] for unit in members]
    # a row per sample, each as long as the longest of the unit
    sizes = [len(u) * max(u) if padded else sum(u) for u in of_units]
    packed = pack_into_bins(sizes, max_tokens, ranks=ranks, padded=padded)
    return [[i for unit in b for i in members[unit]] for b in packed]


def pack_into_bins(
    sizes: list[int], max_tokens: int, *, ranks: int = 1, padded: bool = True, costs: list[float] | None = None
) -> list[list[int]]:
    """Pack units (sequences or groups) into micro-batches of at most `max_tokens`. Return indices into `sizes`.

    Rank r has micro-batches r, r + ranks, r + 2 ranks, ... All ranks have the same number of forward passes, of about
    equal cost. Micro-batches are empty if there are fewer units than ranks.

    padded: the size is rows x longest row, as in a padded layout, so units of similar length are combined. Otherwise it
    is the sum of lengths, and long and short units are mixed. costs: cost of each unit; None: cost of one sequence.

    >>> pack_into_bins([5, 3, 3, 1], 6)  # padded: [5] + [3, 3] + [1]
    [[1, 2], [0], [3]]
    >>> pack_into_bins([5, 3, 3, 1], 6, padded=False)  # 5 + 1 and 3 + 3
    [[0, 3], [1, 2]]
    """
    if not sizes:
        raise RunStopped(
            "an update has no token to train on: its samples failed, or the algorithm excluded them (overlong.mode)"
        )
    longest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    if (longest := sizes[longest_first[0]]) > max_tokens:
        raise TooLarge(longest, max_tokens)

    costs = [estimate_cost(n) for n in sizes] if costs is None else costs

    def bin_cost(chosen: list[int]) -> float:
        if padded:
            # the first of a padded bin is its longest, and every row is as long
            return len(chosen) * costs[chosen[0]] if chosen else 0.0
        return sum(costs[i] for i in chosen)

    if padded:
        bins = _pack_like_lengths(sizes, longest_first, max_tokens, ranks)
    else:
        bins = _pack_mixed_lengths(sizes, costs, longest_first, max_tokens, ranks)
    return _deal_to_ranks(bins, ranks, bin_cost)


def _pack_like_lengths(sizes: list[int], longest_first: list[int], max_tokens: int, ranks: int) -> list[list[int]]:
    """Pack units of similar length into as few bins as possible, with the largest bin as small as possible."""

    def fill_bins(cap: int) -> list[list[int]]:
        filled: list[list[int]] = []
        for i in longest_first:
            if not filled or (len(filled[-1]) + 1) * sizes[filled[-1][0]] > cap:
                filled.append([])
            filled[-1].append(i)
        return filled

    # The number of bins is the minimum for the budget, rounded up to the ranks. A binary search then finds the smallest
    # budget with that number, which evens out the bins.
    wanted = -(-len(fill_bins(max_tokens)) // ranks) * ranks
    low, high = sizes[longest_first[0]], max_tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(fill_bins(middle)) <= wanted else (middle + 1, high)
    even = fill_bins(low)
    return even + [[] for _ in range(wanted - len(even))]


def _pack_mixed_lengths(
    sizes: list[int], costs: list[float], longest_first: list[int], max_tokens: int, ranks: int
) -> list[list[int]]:
    """Pack units greedily into few bins, each of about the same cost."""
    n = -(-sum(sizes) // max_tokens // ranks) * ranks
    while (filled := _fill_evenly(sizes, costs, longest_first, max_tokens, n)) is None:
        # by 0.5 % of many bins, so that the number of attempts does not grow with them; with one bin per unit, all fit
        n += -(-n // 200 // ranks) * ranks
    return filled


def _fill_evenly(
    sizes: list[int], costs: list[float], longest_first: list[int], max_tokens: int, n: int
) -> list[list[int]] | None:
    """Put each unit, longest first, into the cheapest bin with room. Return None if no bin has room."""
    filled: list[list[int]] = [[] for _ in range(n)]
    spent, room = np.zeros(n), np.full(n, max_tokens)
    for i in longest_first:
        b = spent.argmin()  # among equals, the lowest number
        if room[b] < sizes[i]:
            b = np.where(room >= sizes[i], spent, np.inf).argmin()
        if room[b] < sizes[i]:
            return None
        filled[b].append(i)
        room[b] -= sizes[i]
        spent[b] += costs[i]
    return filled


def _deal_to_ranks(bins: list[list[int]], ranks: int, bin_cost: Callable[[list[int]], float]) -> list[list[int]]:
    """Distribute bins over ranks, balancing the cost. Return them interleaved, as in pack_into_bins."""
    # Greedy LPT (longest processing time first): each bin, the most expensive first, goes to the rank with the lowest
    # cost so far. Ranks with their share of bins are full, since all ranks run the same number of forward passes.
    each = len(bins) // ranks
    hands: list[list[list[int]]] = [[] for _ in range(ranks)]
    costs = [bin_cost(chosen) for chosen in bins]
    # ranks that are not full, by the cost so far; among equals, the lowest number
    waiting = [(0.0, rank) for rank in range(ranks)]
    for n in sorted(range(len(bins)), key=costs.__getitem__, reverse=True):
        held, rank = heappop(waiting)
        hands[rank].append(bins[n])
        if len(hands[rank]) < each:
            heappush(waiting, (held + costs[n], rank))
    return [hand[n] for n in range(each) for hand in hands]
