"""Numbers of sequences, groups and sources in a micro-batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from core.types.samples import Sample


def number_samples(
    samples: list[Sample],
    groups: list[int] | None,
    episodes: Sequence[int] | None,
    *,
    counts: Sequence[int],
    has_seq_ids: bool,
    sources: Sequence[str],
) -> dict[str, list[int]]:
    """Return each sample's numbers for the id columns of its tokens, by column name. counts: its tokens."""
    found: dict[str, list[int]] = {}
    if groups is not None:
        found["group_ids"] = renumber(groups, counts)
    if has_seq_ids:
        found["seq_ids"] = renumber(range(len(samples)) if episodes is None else episodes, counts)
    if sources:
        found["source_ids"] = [sources.index(s.prompt.source) for s in samples]
    return found


def renumber(given: Sequence[Hashable], counts: Sequence[int] | None = None) -> list[int]:
    """Renumber values from 0, in order of appearance. A value whose counts are all 0 has no number, but 0.

    >>> renumber([7, 3, 7])
    [0, 1, 0]
    >>> renumber([7, 3, 5], [0, 2, 1])
    [0, 0, 1]
    """
    # without gaps: sums per sequence index an array of these numbers
    there = given if counts is None else [one for one, n in zip(given, counts, strict=True) if n]
    numbers = {one: n for n, one in enumerate(dict.fromkeys(there))}
    return [numbers.get(one, 0) for one in given]
