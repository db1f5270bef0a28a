"""Bin packing of sequences with shared prefixes, which count once per micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.types.samples import Sample
from data_feeds.packing.bin_packing import estimate_cost, pack_into_bins
from data_feeds.packing.inputs import make_keys
from data_feeds.packing.prefix_tree import gather_families, sort_by_prefix

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]
LEAST_SHARED = 16
"""Minimum number of common tokens for sequences of different groups to share a family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    """Families or parts of them, each computed in one micro-batch; [P] each."""

    starts: Ints
    """Index of the first sequence of each piece. It ends before the next start."""
    sizes: Ints
    """Number of distinct tokens, or of trained tokens if larger (many copies): every trained token needs logits."""
    costs: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Families:
    """Sequences of all families, end to end; [N] each. Families are sorted, so any contiguous piece is a tree."""

    members: Ints
    lengths: Ints
    shared: Ints
    """Number of tokens shared with the previous sequence; 0 for the first of a family."""
    trained: Ints
    """Number of trained tokens."""
    is_first: NDArray[np.bool_]
    """True for the first sequence of each family."""
    siblings: Ints
    """Number of sequences in the family."""
    middle: Floats
    """Position of the middle of a sequence's own tokens among all own tokens of the family, from 0 to 1."""
    costs: Floats
    """Cost of each sequence beyond the previous one. Every token attends to all earlier tokens of the sequence."""

    @classmethod
    def of(cls, *, members: Ints, sizes: list[int], lengths: Ints, shared: Ints, trained: Ints) -> _Families:
        """Return families of `sizes` sequences."""
        counts = np.array(sizes)
        begins = counts.cumsum() - counts
        several = begins[counts > 1]
        own = lengths - shared
        own[several] -= shared[several + 1]  # the common prefix belongs to no single sequence
        ends, totals = own.cumsum(), np.add.reduceat(own, begins)
        middles = ends - own / 2 - np.repeat(ends[begins] - own[begins], counts)
        is_first = np.zeros(len(members), dtype=np.bool_)
        is_first[begins] = True
        return cls(
            members=members,
            lengths=lengths,
            shared=shared,
            trained=trained,
            is_first=is_first,
            siblings=np.repeat(counts, counts),
            middle=middles / np.repeat(np.maximum(totals, 1), counts),
            costs=estimate_cost(lengths) - estimate_cost(shared),
        )

    def measure(self, starts: Ints) -> _Pieces:
        """Return the pieces that begin at `starts`."""
        again = self.shared[starts]  # a piece computes the shared prefix of its first sequence again
        tokens = np.add.reduceat(self.lengths - self.shared, starts) + again
        return _Pieces(
            starts=starts,
            sizes=np.maximum(tokens, np.add.reduceat(self.trained, starts)),
            costs=np.add.reduceat(self.costs, starts) + estimate_cost(again),
        )

    def cut(self, pieces: int, max_tokens: int) -> _Pieces:
        """Cut each family into `pieces` of about equal numbers of own tokens, or more if a piece is too large.

        Families with fewer sequences are cut into single sequences.
        """
        wanted = np.minimum(pieces, self.siblings)
        # A sequence belongs to the piece at the middle of its own tokens. So a cut falls between sequences, as close to
        # the even split as possible.
        numbers = np.minimum(self.middle * wanted, wanted - 1).astype(int)
        is_start = self.is_first | _find_changes(numbers)
        done = self.measure(np.flatnonzero(is_start))
        if not (too_large := np.flatnonzero(done.sizes > max_tokens)).size:
            return done
        stops = [*done.starts[1:].tolist(), len(numbers)]
        for n in too_large.tolist():
            is_start[list(self._fill(int(done.starts[n]), stops[n], max_tokens))] = True
        return self.measure(np.flatnonzero(is_start))

    def _fill(self, first: int, end: int, max_tokens: int) -> Iterator[int]:
        """Yield the sequences at which to cut, so that no part exceeds `max_tokens`."""
        tokens = trained = 0
        for i in range(first, end):
            # the first sequence of a part computes its whole prefix again
            more = self.lengths[i] - (self.shared[i] if tokens else 0)
            is_full = max(tokens + more, trained + self.trained[i]) > max_tokens
            if i > first and is_full:  # a single sequence that is too large is refused by pack_into_bins
                yield i
                tokens, trained, more = 0, 0, self.lengths[i]
            tokens, trained = tokens + more, trained + self.trained[i]


def _find_changes(values: Ints) -> NDArray[np.bool_]:
    """Return True at the first value, and at each value that differs from the previous one."""
    changes = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


def find_families(samples: Sequence[Sample], groups: Sequence[int]) -> list[int]:
    """Return the family number of each sample. Samples of a family share common prefixes.

    A family is a group. If all groups are single samples, as in SFT, samples with a common prefix such as a system
    prompt form a family. Samples with fewer than LEAST_SHARED common tokens stay alone, since single samples pack
    better.
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
    """Pack samples with shared prefixes into micro-batches, as pack_into_bins does. Return their indices.

    A family is cut only if it does not fit, or if that shortens the slowest rank's work. Both sides then compute the
    common prefix. whole: never cut a family.
    """
    if not samples:
        return pack_into_bins([], max_tokens)  # raises: there is nothing to train on
    ordered = _sort_families(samples, families)
    uncut = ordered.measure(np.flatnonzero(ordered.is_first))
    largest = int(ordered.siblings.max())
    # A cut repeats a prefix, so it must save at least 1 % of the slowest rank's cost. The search ends when no cut
    # could: at most 1 % above an even split without repetition. The number of parts doubles, so that the number of
    # attempts grows only with the logarithm of the largest family.
    least = float(uncut.costs.sum()) / ranks  # cost of each rank if no family is cut
    best: tuple[float, _Pieces, list[list[int]]] | None = None
    parts = 1
    while True:
        pieces = uncut if whole else ordered.cut(parts, max_tokens)
        cost, bins = _pack_pieces(pieces, max_tokens, ranks)
        if best is None or cost < 0.99 * best[0]:
            best = cost, pieces, bins
        if whole or parts >= largest or 0.99 * best[0] <= least:
            break
        parts = min(2 * parts, largest)
    _, pieces, bins = best
    members, borders = ordered.members.tolist(), [*pieces.starts.tolist(), len(samples)]
    return [[i for n in b for i in members[borders[n] : borders[n + 1]]] for b in bins]


def _sort_families(samples: Sequence[Sample], families: Sequence[int]) -> _Families:
    members: list[int] = []
    lengths: list[int] = []
    shared: list[int] = []
    gathered = gather_families(range(len(samples)), families)
    for chosen in gathered:
        keys = make_keys([samples[i] for i in chosen])
        order, in_common = sort_by_prefix(keys)
        members += [chosen[n] for n in order]
        lengths += [len(keys[n]) for n in order]
        shared += in_common
    return _Families.of(
        members=np.array(members, dtype=np.int64),
        sizes=[len(chosen) for chosen in gathered],
        lengths=np.array(lengths, dtype=np.int64),
        shared=np.array(shared, dtype=np.int64),
        trained=np.array([samples[i].n_trained for i in members], dtype=np.int64),
    )


def _pack_pieces(pieces: _Pieces, max_tokens: int, ranks: int) -> tuple[float, list[list[int]]]:
    """Pack pieces. Return the cost of the slowest rank, and the piece numbers of each micro-batch."""
    costs = pieces.costs.tolist()
    bins = pack_into_bins(pieces.sizes.tolist(), max_tokens, ranks=ranks, padded=False, costs=costs)
    slowest = max(sum(costs[i] for b in bins[rank::ranks] for i in b) for rank in range(ranks))
    return slowest, bins
