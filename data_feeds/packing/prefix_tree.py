"""Prefix tree of token sequences in one row: shared prefixes occur once.

Sequences of a family (the samples of a prompt) often begin with the same token ids. These are the prompt, and after
several turns more than the prompt. The row is then a forest of segments. A segment continues its parent, and a common
part of several sequences is one segment:

    prompt + reply A        [prompt] -> [reply A]
    prompt + reply B                 -> [reply B]       10 + 4 + 5 tokens instead of 14 + 15

Only token ids decide, exactly; the end of a prompt plays no role. (Tokens of images have unique numbers here, see
inputs.py.) A sequence may be a prefix or a copy of another. So one position of the row can belong to several
sequences, and predict a different token in each. Above, the last prompt token predicts the first token of both replies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
"""Numbers below 2^31, at half the bytes of int64: a step has millions."""
Array = NDArray[np.integer[Any]]
Ids = Sequence[int] | Array
"""Token ids of one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of T input tokens in S segments. Parents come before their children."""

    input_ids: Ints
    """[T] token ids."""
    position_ids: Ints
    """[T] position in the sequence; continues from parent to child."""
    segment_ids: Ints
    """[T] segment number: 0..S-1."""
    parents: NDArray[np.int64]
    """[S] parent segment, or -1 at the start of a sequence."""
    sizes: NDArray[np.int64]
    """[S] number of tokens of each segment."""
    order: Ints
    """Row position of every token of all sequences, end to end."""
    lengths: list[int]
    """Number of tokens of each sequence."""

    @property
    def places(self) -> list[Ints]:
        """[L] for each sequence: row positions of all of its tokens."""
        ends = [*accumulate(self.lengths)]
        return [self.order[end - n : end] for end, n in zip(ends, self.lengths, strict=True)]


@dataclass(slots=True, kw_only=True)
class _Segment:
    """Tokens start..stop of the sequence `owner`, shared by all sequences through this segment."""

    owner: int
    start: int
    stop: int
    parent: int
    depth: int


def lay_out_row(sequences: Sequence[Ids], families: Sequence[Hashable] | None = None) -> Row:
    """Lay sequences end to end. Sequences of a family share common prefixes; None: no sharing.

    >>> row = lay_out_row([[7, 8, 1, 2], [7, 8, 3]], families=["a", "a"])
    >>> row.input_ids.tolist(), row.position_ids.tolist(), row.segment_ids.tolist(), row.parents.tolist()
    ([7, 8, 3, 1, 2], [0, 1, 2, 2, 3], [0, 0, 1, 2, 2], [-1, 0, 0])
    >>> [place.tolist() for place in row.places]
    [[0, 1, 3, 4], [0, 1, 2]]
    """
    ids: list[Array] = [np.asarray(sequence) for sequence in sequences]
    if families is None:
        segments = [_Segment(owner=i, start=0, stop=len(own), parent=-1, depth=0) for i, own in enumerate(ids)]
        paths = [[i] for i in range(len(ids))]
    else:
        segments, paths = _sort_segments(*_grow_forest(ids, families))
    lengths = [s.stop - s.start for s in segments]
    sizes = np.array(lengths, dtype=np.int64)
    # slices of one long range, since thousands of calls of arange would take longer
    along = np.arange(max(sum(lengths), *map(len, ids)) if ids else 0, dtype=np.int32)
    spans = [along[end - n : end] for end, n in zip(accumulate(lengths), lengths, strict=True)]
    return Row(
        input_ids=_join([ids[s.owner][s.start : s.stop] for s in segments]),
        position_ids=_join([along[s.start : s.stop] for s in segments]),
        segment_ids=np.repeat(np.arange(len(segments), dtype=np.int32), sizes),
        parents=np.array([s.parent for s in segments], dtype=np.int64),
        sizes=sizes,
        order=_join([spans[n] for path in paths for n in path]),
        lengths=[len(own) for own in ids],
    )


def gather_families(numbers: Iterable[int], families: Sequence[Hashable]) -> list[list[int]]:
    """Return the sequences of each family, among these numbers. `families[i]` is the family of sequence i.

    >>> gather_families([0, 1, 3], families=["a", "b", "a", "a"])
    [[0, 3], [1]]
    """
    members: dict[Hashable, list[int]] = {}
    for i in numbers:
        members.setdefault(families[i], []).append(i)
    return list(members.values())


def sort_by_prefix(ids: Sequence[Array]) -> tuple[list[int], list[int]]:
    """Sort sequences so that common prefixes are adjacent. Return their numbers in this order.

    Also returns the number of tokens each shares with its predecessor (0 for the first). The sum of lengths minus
    shared is the number of distinct tokens in the tree.

    >>> sort_by_prefix([np.array([7, 8, 9]), np.array([5]), np.array([7, 8])])
    ([1, 2, 0], [0, 0, 2])
    """
    # a plan sorts the sequences of its micro-batches, so these are sorted already
    if (shared := _count_sorted(ids)) is not None:
        return [*range(len(ids))], shared
    # big-endian bytes sort as the ids do, and faster than lists
    keys = [own.astype(">i4").tobytes() for own in ids]
    order = sorted(range(len(ids)), key=keys.__getitem__)
    return order, [0, *(_count_common(ids[a], ids[b]) for a, b in pairwise(order))]


def _count_sorted(ids: Sequence[Array]) -> list[int] | None:
    """Return the number of tokens each sequence shares with its predecessor; None if they are not sorted."""
    shared = [0] * len(ids)
    for i, (one, other) in enumerate(pairwise(ids), start=1):
        shared[i] = n = _count_common(one, other)
        if n < len(one) and (n == len(other) or one[n] > other[n]):
            return None
    return shared


def _count_common(a: Array, b: Array) -> int:
    """Return the length of the common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0  # the first True; 0 if there is none
    return first if n and differs[first] else n


def _grow_forest(ids: list[Array], families: Sequence[Hashable]) -> tuple[list[_Segment], list[list[int]]]:
    """Return the segments of all families, and each sequence's path of segments from the root."""
    segments: list[_Segment] = []
    paths: list[list[int]] = [[] for _ in ids]
    for chosen in gather_families(range(len(ids)), families):
        order, shared = sort_by_prefix([ids[i] for i in chosen])
        _grow_tree([chosen[n] for n in order], shared, [len(ids[chosen[n]]) for n in order], segments, paths)
    return segments, paths


def _grow_tree(
    order: list[int], shared: list[int], lengths: list[int], segments: list[_Segment], paths: list[list[int]]
) -> None:
    """Add the segments of one family. order: sorted sequences; shared: tokens in common with the predecessor."""
    # Iterative, not recursive: a tree may be as deep as an episode has turns. Sorted neighbours share at least as much
    # as distant sequences, so the minimum of `shared` is the common prefix of a range.
    todo = [(0, len(order), 0, -1, 0)]  # from..to of `order`, which agree in the first `start` tokens; parent; depth
    while todo:
        first, end, start, parent, depth = todo.pop()
        stop = min([lengths[first], *shared[first + 1 : end]])
        if stop > start:
            segments.append(_Segment(owner=order[first], start=start, stop=stop, parent=parent, depth=depth))
            parent, depth = len(segments) - 1, depth + 1
            for i in order[first:end]:
                paths[i].append(parent)
        if end - first > 1:
            # a child begins at each sequence that shares no more than this segment with its predecessor
            cuts = [first, *(n for n in range(first + 1, end) if shared[n] == stop), end]
            todo += [(a, b, stop, parent, depth) for a, b in pairwise(cuts)]


def _sort_segments(segments: list[_Segment], paths: list[list[int]]) -> tuple[list[_Segment], list[list[int]]]:
    """Sort segments by depth, start and stop, parents first. Equal shapes become neighbours.

    The attention kernel computes such neighbours in one call.
    """
    order = sorted(range(len(segments)), key=lambda n: (segments[n].depth, segments[n].start, segments[n].stop))
    number = {old: new for new, old in enumerate(order)} | {-1: -1}
    for segment in segments:
        segment.parent = number[segment.parent]
    return [segments[n] for n in order], [[number[n] for n in path] for path in paths]


def _join(parts: Sequence[Array]) -> Ints:
    return np.concatenate(parts, dtype=np.int32) if parts else np.empty(0, dtype=np.int32)
