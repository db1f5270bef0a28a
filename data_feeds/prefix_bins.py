"""Distribute sequences that share their beginnings over micro-batches and ranks, counting what is shared once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from core.types import Sample
from data_feeds.bin_packing import estimate_cost, pack_into_bins
from data_feeds.prefix_tree import gather_families, sort_by_prefix
from data_feeds.row_pictures import make_keys

LEAST_SHARED = 16
"""Tokens that rows of different groups must have in common to be computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Sequences with common beginnings, sorted, so that a piece of the list is a tree again."""

    members: list[int]
    lengths: list[int]
    shared: list[int]
    """Tokens in common with the sequence before; 0 for the first."""
    trained: list[int]
    """Tokens that are trained on."""

    def new_tokens(self, first: int, i: int) -> int:
        """Return how many tokens sequence i adds to a piece that begins with sequence `first`."""
        return self.lengths[i] - (self.shared[i] if i > first else 0)

    def cost(self, first: int, end: int) -> float:
        """Estimate the cost of a piece: every token attends to all that is before it in its sequence."""
        return sum(
            estimate_cost(self.lengths[i]) - estimate_cost(self.shared[i] if i > first else 0)
            for i in range(first, end)
        )

    def size(self, first: int, end: int) -> int:
        """Return the size of a piece: its different tokens, or its trained ones, which all need logits, if more.

        There are more of these where many sequences are copies.
        """
        return max(sum(self.new_tokens(first, i) for i in range(first, end)), sum(self.trained[first:end]))

    def cut(self, pieces: int, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Cut the list into `pieces` of about the same number of own tokens, and further where one is too large."""
        own = np.array([self.new_tokens(0, i) for i in range(len(self.members))], dtype=np.float64)
        own[0] -= self.shared[1] if len(own) > 1 else 0  # the common beginning is nobody's own
        middles = own.cumsum() - own / 2
        numbers = np.minimum(middles / max(own.sum(), 1e-9) * pieces, pieces - 1).astype(int)
        first = tokens = trained = 0
        for i in range(len(own)):
            is_full = max(tokens + self.new_tokens(first, i), trained + self.trained[i]) > max_tokens
            if i and (is_full or numbers[i] != numbers[i - 1]):
                yield first, i
                first, tokens, trained = i, 0, 0
            tokens, trained = tokens + self.new_tokens(first, i), trained + self.trained[i]
        yield first, len(own)


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
    sorted_families = _sort_families(samples, families)
    largest = 1 if whole or ranks == 1 else max((len(f.members) for f in sorted_families), default=1)
    best: tuple[float, list[list[int]]] | None = None
    pieces = 1
    while True:
        cost, bins = _pack_pieces(sorted_families, pieces, max_tokens, ranks, whole=whole)
        if best is None or cost < 0.99 * best[0]:
            best = cost, bins
        if pieces >= largest:
            return best[1]
        pieces = min(2 * pieces, largest)


def _sort_families(samples: Sequence[Sample], families: Sequence[int]) -> list[_Family]:
    done: list[_Family] = []
    for chosen in gather_families(range(len(samples)), families):
        ids = make_keys([samples[i] for i in chosen])
        order, shared = sort_by_prefix(ids)
        in_order = [chosen[n] for n in order]
        done.append(
            _Family(
                members=in_order,
                lengths=[len(ids[n]) for n in order],
                shared=shared,
                trained=[samples[i].n_trained for i in in_order],
            )
        )
    return done


def _pack_pieces(
    families: list[_Family], pieces: int, max_tokens: int, ranks: int, *, whole: bool
) -> tuple[float, list[list[int]]]:
    """Cut each family and pack the pieces; return the cost of the slowest rank too."""
    cuts = (
        [(f, (0, len(f.members))) for f in families]
        if whole
        else [(f, cut) for f in families for cut in f.cut(min(pieces, len(f.members)), max_tokens)]
    )
    costs = [f.cost(*cut) for f, cut in cuts]
    bins = pack_into_bins([f.size(*cut) for f, cut in cuts], max_tokens, ranks=ranks, padded=False, costs=costs)
    slowest = max(sum(costs[i] for b in bins[rank::ranks] for i in b) for rank in range(ranks))
    return slowest, [[i for n in b for f, (first, end) in [cuts[n]] for i in f.members[first:end]] for b in bins]
