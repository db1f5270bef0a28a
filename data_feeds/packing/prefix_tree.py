"""Lay token sequences end to end in one row, with what they share laid once.

Sequences of one family (the samples of a prompt) often begin with the same token ids: the prompt, and in episodes of
several turns more than the prompt. The row is then a forest of segments. A segment continues its parent, and what
several sequences have in common is in one segment:

    prompt + reply A        [prompt] -> [reply A]
    prompt + reply B                 -> [reply B]       10 + 4 + 5 tokens instead of 14 + 15

Only token ids decide, exactly: nothing is assumed about where a prompt ends. (An image's tokens have numbers of their
own there, see row_images.py.) A sequence may be the beginning of
another, or its copy. So one position of the row can belong to several sequences, and predict another token in each:
above, the last token of the prompt predicts the first token of both replies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.types.arrays import repeat_runs

Ints = NDArray[np.int64]
Array = NDArray[np.integer[Any]]
Ids = Sequence[int] | Array
"""Token ids of one sequence."""
FIRST_LOOK = 512
"""Ids of two sequences that are compared at first; more if they are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Hold one row of T input tokens: S segments, every parent before its children."""

    input_ids: Ints
    """[T] token ids."""
    position_ids: Ints
    """[T] position in the sequence; goes on from the parent to the child."""
    segment_ids: Ints
    """[T] number of the segment: 0..S-1."""
    parents: Ints
    """[S] segment that each continues; -1 where a sequence begins."""
    order: Ints
    """Place in the row of every token of all sequences, end to end."""
    lengths: list[int]
    """Tokens of each sequence."""

    @property
    def places(self) -> list[Ints]:
        """[L] for each sequence: the place of every token of it in the row."""
        ends = [*accumulate(self.lengths)]
        return [self.order[end - n : end] for end, n in zip(ends, self.lengths, strict=True)]


@dataclass(slots=True, kw_only=True)
class _Segment:
    """Tokens start..stop of the sequence `owner`, and of all others that pass through it."""

    owner: int
    start: int
    stop: int
    parent: int
    depth: int


def lay_out_row(sequences: Sequence[Ids], families: Sequence[Hashable] | None = None) -> Row:
    """Lay sequences end to end; those of one family share their common beginnings. None: nothing is shared.

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
    along = np.arange(max(sum(lengths), *map(len, ids)) if ids else 0)
    spans = [along[end - n : end] for end, n in zip(accumulate(lengths), lengths, strict=True)]
    return Row(
        input_ids=_join([ids[s.owner][s.start : s.stop] for s in segments]),
        position_ids=_join([along[s.start : s.stop] for s in segments]),
        segment_ids=repeat_runs(np.arange(len(segments)), lengths),
        parents=np.array([s.parent for s in segments], dtype=np.int64),
        order=_join([spans[n] for path in paths for n in path]),
        lengths=[len(own) for own in ids],
    )


def gather_families(numbers: Iterable[int], families: Sequence[Hashable]) -> list[list[int]]:
    """Return the sequences of each family among these numbers; `families[i]` is that of sequence i.

    >>> gather_families([0, 1, 3], families=["a", "b", "a", "a"])
    [[0, 3], [1]]
    """
    members: dict[Hashable, list[int]] = {}
    for i in numbers:
        members.setdefault(families[i], []).append(i)
    return list(members.values())


def sort_by_prefix(ids: Sequence[Array]) -> tuple[list[int], list[int]]:
    """Sort sequences so that those with a common beginning are neighbours; return their numbers in this order.

    Also returns how many tokens each shares with the one before it (the first: 0). The sum of length minus shared is
    the number of different tokens in the tree of all.

    >>> sort_by_prefix([np.array([7, 8, 9]), np.array([5]), np.array([7, 8])])
    ([1, 2, 0], [0, 0, 2])
    """
    if len(ids) < 2:
        return [*range(len(ids))], [0] * len(ids)
    n = min(FIRST_LOOK, *map(len, ids))
    heads = np.concatenate([own[:n] for own in ids]).reshape(len(ids), n)
    keys = [row.tobytes() for row in heads.astype(">i4")]
    if len({*keys}) == len(keys):  # the usual case: all pairs are compared in one call
        order = sorted(range(len(ids)), key=keys.__getitem__)
        differs = heads[order[1:]] != heads[order[:-1]]
        return order, [0, *differs.argmax(axis=1).tolist()]
    order = sorted(range(len(ids)), key=_make_long_keys(ids).__getitem__)
    return order, [0, *(_count_common(ids[a], ids[b]) for a, b in pairwise(order))]


def _make_sort_keys(ids: Iterable[Array]) -> list[bytes]:
    """Return the bytes of the ids, which sort as the ids do."""
    return [own.astype(">i4").tobytes() for own in ids]


def _make_long_keys(ids: Sequence[Array]) -> list[bytes]:
    """Return keys of so many first ids that they differ, or of all."""
    longest = max(map(len, ids))
    n = FIRST_LOOK
    while True:
        keys = _make_sort_keys(own[:n] for own in ids)
        if n >= longest or len({*keys}) == len(keys):
            return keys
        n *= 4


def _count_common(a: Array, b: Array) -> int:
    """Return how many first ids are the same; most sequences differ early, so it looks at more and more of them."""
    begin, end, n = 0, FIRST_LOOK, min(len(a), len(b))
    while begin < n:
        differs = a[begin : min(end, n)] != b[begin : min(end, n)]
        first = int(differs.argmax())
        if differs[first]:
            return begin + first
        begin, end = end, 4 * end
    return n


def _grow_forest(ids: list[Array], families: Sequence[Hashable]) -> tuple[list[_Segment], list[list[int]]]:
    """Return the segments of all families, and the path of each sequence: its segments from the root on."""
    segments: list[_Segment] = []
    paths: list[list[int]] = [[] for _ in ids]
    for chosen in gather_families(range(len(ids)), families):
        order, shared = sort_by_prefix([ids[i] for i in chosen])
        _grow_tree([chosen[n] for n in order], shared, [len(ids[chosen[n]]) for n in order], segments, paths)
    return segments, paths


def _grow_tree(
    order: list[int], shared: list[int], lengths: list[int], segments: list[_Segment], paths: list[list[int]]
) -> None:
    """Add the segments of one family. order: its sequences, sorted; shared: tokens in common with the one before."""
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
            cuts = [first, *(n for n in range(first + 1, end) if shared[n] == stop), end]
            todo += [(a, b, stop, parent, depth) for a, b in pairwise(cuts)]


def _sort_segments(segments: list[_Segment], paths: list[list[int]]) -> tuple[list[_Segment], list[list[int]]]:
    """Put segments with as many tokens before them, and of the same length, next to each other, parents first.

    The attention kernel computes such neighbours in one call.
    """
    order = sorted(range(len(segments)), key=lambda n: (segments[n].depth, segments[n].start, segments[n].stop))
    number = {old: new for new, old in enumerate(order)} | {-1: -1}
    for segment in segments:
        segment.parent = number[segment.parent]
    return [segments[n] for n in order], [[number[n] for n in path] for path in paths]


def _join(parts: Sequence[Array]) -> Ints:
    return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, dtype=np.int64)
