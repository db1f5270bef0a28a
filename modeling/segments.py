"""The segments of a packed row, as the attention kernels need them.

A row of T tokens is a forest of S segments (data_feeds/packing/prefix_tree.py makes it). A token attends to the tokens
of the segments above its own, and causally to its own segment. Together these are the sequence up to the token, so what
a kernel computes is the attention of every sequence by itself, with what sequences share computed once. In a row that
shares nothing every segment is a whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from core.types.samples import Batch
from modeling.sequence_parallel import SequenceGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSegments:
    """Neighbouring segments of the same length, with as many tokens above them: one call of a kernel."""

    first: int
    count: int
    own: int
    """Tokens of each segment."""
    above: int
    """Tokens of the segments above each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenIndex:
    """Tell a kernel for several lengths where queries end by segment, and keys by segment with all above it."""

    keys: Tensor | None
    """Place in the row of every key, segment by segment; None where nothing is shared, and keys are as queries."""
    query_ends: Tensor
    """[S + 1] int32, where each segment's queries end, after a 0."""
    key_ends: Tensor
    """[S + 1] int32, where each segment's keys end, after a 0."""
    longest_query: int
    longest_key: int


@dataclass(slots=True)
class Segments:
    """The segments of one row; lives for one forward and backward pass, and keeps the masks of its layers."""

    lengths: list[int]
    parents: list[int]
    """Segment that each continues, with a smaller number; -1 for none."""
    sequence_group: SequenceGroup | None = None
    """Ranks that hold a slice of the row each; None where this one holds all of it."""
    chains: list[list[int]] = field(init=False)
    """Segments above each, from the root down."""
    runs: list[EqualSegments] = field(init=False)
    _masks: dict[tuple[int, int, int | None], Tensor] = field(init=False, default_factory=dict)
    _varlen: VarlenIndex | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.chains = []
        for i, parent in enumerate(self.parents):
            if parent >= i:
                raise ValueError(f"segment {i} continues segment {parent}, which must come before it")
            self.chains.append([] if parent < 0 else [*self.chains[parent], parent])
        above = [sum(self.lengths[a] for a in chain) for chain in self.chains]
        self.runs = []
        first = 0
        for (own, before), same in groupby(zip(self.lengths, above, strict=True)):
            count = len(list(same))
            self.runs.append(EqualSegments(first=first, count=count, own=own, above=before))
            first += count

    @staticmethod
    def of_batch(batch: Batch, sequence_group: SequenceGroup | None = None) -> Segments:
        """Return the segments of a batch in one row; padding, where a group needs it, is a segment by itself."""
        lengths = torch.bincount(batch.segment_ids, minlength=len(batch.parents)).tolist()
        parents = batch.parents.tolist()
        if sequence_group is not None and (padding := sequence_group.slice_row(sum(lengths)).padding):
            lengths, parents = [*lengths, padding], [*parents, -1]
        return Segments(lengths, parents, sequence_group)

    @property
    def are_shared(self) -> bool:
        """True where sequences share segments."""
        return any(parent >= 0 for parent in self.parents)

    def find_mask(self, run: EqualSegments, window: int | None, device: torch.device) -> Tensor | None:
        """Return the mask [own, above + own] of a run, True where row t may attend; None for a plain causal one.

        Row t is token `above + t` of its sequence: it sees that many tokens and itself, and of these the last `window`.
        """
        banded = window is not None and run.above + run.own > window
        if run.above == 0 and not banded:
            return None
        key = (run.own, run.above, window if banded else None)
        if key not in self._masks:
            seen = torch.ones(run.own, run.above + run.own, dtype=torch.bool, device=device).tril(run.above)
            self._masks[key] = seen.triu(run.above + 1 - window) if banded and window is not None else seen
        return self._masks[key]

    def index_keys(self, device: torch.device) -> VarlenIndex:
        """Return the places of queries and keys for a kernel that takes all segments in one call."""
        if self._varlen is None:
            ends = [0, *accumulate(self.lengths)]
            spans = [torch.arange(a, b, device=device) for a, b in pairwise(ends)]
            seen = [sum(self.lengths[a] for a in [*chain, i]) for i, chain in enumerate(self.chains)]
            chosen = [spans[a] for i, chain in enumerate(self.chains) for a in [*chain, i]]
            self._varlen = VarlenIndex(
                keys=torch.cat(chosen) if self.are_shared else None,
                query_ends=torch.tensor(ends, dtype=torch.int32, device=device),
                key_ends=torch.tensor([0, *accumulate(seen)], dtype=torch.int32, device=device),
                longest_query=max(self.lengths),
                longest_key=max(seen),
            )
        return self._varlen
