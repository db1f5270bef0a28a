"""Distribute sequences that share their beginnings over micro-batches and ranks, counting what is shared once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.types import Sample
from data_feeds.bin_packing import estimate_cost, pack_into_bins
from data_feeds.prefix_tree import gather_families, sort_by_prefix
from data_feeds.row_pictures import count_inputs, make_keys

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]
LEAST_SHARED = 16
"""Tokens that rows of different groups must have in common to be computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Families:
    """Sequences of all families, end to end; each family is sorted, so that a piece of it is a tree again. [N] each."""

    members: Ints
    family: Ints
    """Number of the family of each, ascending."""
    lengths: Ints
    shared: Ints
    """Tokens in common with the sequence before; 0 for the first of a family."""
    trained: Ints
    """Tokens that are trained on."""

    @property
    def starts(self) -> Ints:
        """[F] Where each family begins."""
        return np.flatnonzero(_find_changes(self.family))

    def measure(self, starts: Ints) -> tuple[Ints, Floats]:
        """Return the size and the cost of the pieces that begin at `starts` and end where the next one begins.

        The size is the number of different tokens, or of trained ones, which all need logits, if there are more of
        these: where many sequences are copies. For the cost, every token attends to all before it in its sequence.
        """
        again = self.shared[starts]  # what the first sequence of a piece shares is computed there too
        tokens = np.add.reduceat(self.lengths - self.shared, starts) + again
        costs = np.add.reduceat(estimate_cost(self.lengths) - estimate_cost(self.shared), starts)
        sizes = np.maximum(tokens, np.add.reduceat(self.trained, starts))
        return sizes, costs + estimate_cost(again)

    def cut(self, pieces: int, max_tokens: int) -> Ints:
        """Return where pieces begin: each family in `pieces` with about as many own tokens, more if one is too large.

        A family of fewer sequences is cut into single ones.
        """
        begins = self.starts
        counts = np.diff(begins, append=len(self.family))
        several = begins[counts > 1]
        own = self.lengths - self.shared
        own[several] -= self.shared[several + 1]  # the common beginning is nobody's own
        ends, totals = own.cumsum(), np.add.reduceat(own, begins)
        middles = ends - own / 2 - np.repeat(ends[begins] - own[begins], counts)
        wanted = np.repeat(np.minimum(pieces, counts), counts)
        numbers = np.minimum(middles / np.repeat(np.maximum(totals, 1), counts) * wanted, wanted - 1).astype(int)
        is_start = _find_changes(self.family) | _find_changes(numbers)
        starts = np.flatnonzero(is_start)
        stops = np.append(starts[1:], len(own))
        for n in np.flatnonzero(self.measure(starts)[0] > max_tokens):
            is_start[list(self._fill(int(starts[n]), int(stops[n]), max_tokens))] = True
        return np.flatnonzero(is_start)

    def _fill(self, first: int, end: int, max_tokens: int) -> Iterator[int]:
        """Return where a piece must be cut so that none of its parts is larger than `max_tokens`."""
        tokens = trained = 0
        for i in range(first, end):
            more = self.lengths[i] - (self.shared[i] if tokens else 0)
            is_full = max(tokens + more, trained + self.trained[i]) > max_tokens
            if i > first and is_full:
                yield i
                tokens, trained, more = 0, 0, self.lengths[i]
            tokens, trained = tokens + more, trained + self.trained[i]


def _find_changes(values: Ints) -> NDArray[np.bool_]:
    """Return True where a value differs from the one before, and at the first."""
    changes = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


def find_families(samples: Sequence[Sample], groups: Sequence[int]) -> list[int]:
    """Return the number of each sample's family, whose samples share their common beginnings: its group.

    Where every group is one sample, as in SFT, a family is what begins with the same tokens, such as a system prompt.
    Samples that have fewer than LEAST_SHARED tokens in common with others are families of their own, which pack better.
    """
    if len({*groups}) < len(groups):
        return [*groups]
    order, shared = sort_by_prefix(make_keys(samples))
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = np.cumsum(np.array(shared) < LEAST_SHARED)
    return numbers.tolist()


def pack_families(
    samples: Sequence[Sample], families: Sequence[int], max_tokens: int, *, ranks: int = 1, whole: bool = False
) -> list[list[int]]:
    """Pack samples into micro-batches, as pack_into_bins does; return their indices.

    A family stays together as long as that makes no rank wait for another: it is cut, and its common beginning computed
    on both sides, if the slowest rank is done earlier then, or if it does not fit. whole: never cut one.
    """
    if not samples:
        return pack_into_bins([], max_tokens)  # raises: there is nothing to train on
    ordered = _sort_families(samples, families)
    largest = 1 if whole or ranks == 1 else int(np.diff(ordered.starts, append=len(samples)).max())
    least = float(ordered.measure(ordered.starts)[1].sum()) / ranks  # cost of each rank if no family is cut
    best: tuple[float, list[list[int]]] | None = None
    pieces = 1
    while True:
        starts = ordered.starts if whole else ordered.cut(pieces, max_tokens)
        cost, bins = _pack_pieces(ordered, starts, max_tokens, ranks)
        if best is None or cost < 0.99 * best[0]:
            best = cost, bins
        if pieces >= largest or 0.99 * best[0] <= least:
            return best[1]
        pieces = min(2 * pieces, largest)


def _sort_families(samples: Sequence[Sample], families: Sequence[int]) -> _Families:
    members: list[int] = []
    shared: list[int] = []
    gathered = gather_families(range(len(samples)), families)
    for chosen in gathered:
        order, in_common = sort_by_prefix(make_keys([samples[i] for i in chosen]))
        members += [chosen[n] for n in order]
        shared += in_common
    return _Families(
        members=np.array(members, dtype=np.int64),
        family=np.arange(len(gathered)).repeat([len(chosen) for chosen in gathered]),
        lengths=np.array([count_inputs(samples[i]) for i in members], dtype=np.int64),
        shared=np.array(shared, dtype=np.int64),
        trained=np.array([samples[i].n_trained for i in members], dtype=np.int64),
    )


def _pack_pieces(families: _Families, starts: Ints, max_tokens: int, ranks: int) -> tuple[float, list[list[int]]]:
    """Pack the pieces that begin at `starts`; return the cost of the slowest rank too."""
    sizes, costs = (values.tolist() for values in families.measure(starts))
    bins = pack_into_bins(sizes, max_tokens, ranks=ranks, padded=False, costs=costs)
    slowest = max(sum(costs[i] for b in bins[rank::ranks] for i in b) for rank in range(ranks))
    members, borders = families.members.tolist(), [*starts.tolist(), len(families.members)]
    pieces = [members[first:end] for first, end in pairwise(borders)]
    return slowest, [[i for n in b for i in pieces[n]] for b in bins]
