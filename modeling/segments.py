"""Segments of a packed row, in the form that attention kernels need.

A row of T tokens is a forest of S segments (built by data_feeds/packing/prefix_tree.py). A token attends to all tokens
of its segment's ancestors, and causally to its own segment. Together these are the sequence up to the token. So the
kernel computes the attention of every sequence alone, with shared parts computed once. Without sharing, every segment
is a whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from core.types.samples import Batch
from modeling.sequence_parallel import SequenceGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSegments:
    """Neighbouring segments of the same length, with ancestors of the same total length: a single kernel call."""

    first: int
    count: int
    own: int
    """Tokens per segment."""
    above: int
    """Tokens of each segment's ancestors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenIndex:
    """Ends of queries and keys by segment, for a kernel of variable lengths."""

    keys: Tensor | None
    """Row position of every key, segment by segment; None without sharing, since keys match queries then."""
    query_ends: Tensor
    """[S + 1] int32, end of each segment's queries, after a 0."""
    key_ends: Tensor
    """[S + 1] int32, end of each segment's keys, after a 0."""
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PathIndex:
    """Segments of a row after all their ancestors, as rows of their own, padded on the right."""

    places: Tensor
    """[S, L] int64, row position of every token. Padding repeats the last token of the segment."""
    back: Tensor
    """[T] int64, for every position of the row the place among the S * L, in the row of its own segment."""


@dataclass(slots=True)
class Segments:
    """Segments of a row, for a forward and backward pass; caches the masks of the layers."""

    lengths: list[int]
    parents: list[int]
    """Parent of each segment, with a smaller number; -1 for none."""
    sequence_group: SequenceGroup | None = None
    """Ranks with a slice of the row each; None if this rank has all of it."""
    chains: list[list[int]] = field(init=False)
    """Ancestors of each segment, from the root down."""
    runs: list[EqualSegments] = field(init=False)
    _masks: dict[tuple[int | None, ...], Tensor] = field(init=False, default_factory=dict)
    _varlen: VarlenIndex | None = field(init=False, default=None)
    _paths: PathIndex | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.chains = []
        for i, parent in enumerate(self.parents):
            if parent >= i:
                raise ValueError(f"segment {i} continues segment {parent}, which must come before it")
            self.chains.append([] if parent < 0 else [*self.chains[parent], parent])
        above = [sum(self.lengths[a] for a in chain) for chain in self.chains]
        self.runs = []
        first = 0
        # Only neighbours are grouped, so that a run is a slice of the row and needs no copy.
        for (own, before), same in groupby(zip(self.lengths, above, strict=True)):
            count = len(list(same))
            self.runs.append(EqualSegments(first=first, count=count, own=own, above=before))
            first += count

    @staticmethod
    def of_batch(batch: Batch, sequence_group: SequenceGroup | None = None) -> Segments:
        """Return the segments of a batch in a row; padding for a sequence group is a separate segment."""
        lengths, parents = batch.lengths.tolist(), batch.parents.tolist()
        if sequence_group is not None and (padding := sequence_group.slice_row(sum(lengths)).padding):
            lengths, parents = [*lengths, padding], [*parents, -1]
        return Segments(lengths, parents, sequence_group)

    @property
    def are_shared(self) -> bool:
        """True if sequences share segments."""
        return any(parent >= 0 for parent in self.parents)

    def find_mask(
        self,
        run: EqualSegments,
        window: int | None,
        device: torch.device,
        *,
        leading: int | None = None,
        image_ends: Tensor | None = None,
    ) -> Tensor | None:
        """Return the mask [own, above + own] of a run, True where row t may attend; None for a plain causal mask.

        Row t is token `above + t` of its sequence: it attends to the tokens before it and itself, at most the last
        `window`. leading: number of columns before these, which every row sees; then there always is a mask.
        image_ends: [T], see `ImageEnds`; a token also attends to later tokens, up to there. A run with images has a
        mask for each segment, [count, 1, own, above + own].
        """
        # a window wider than the sequence hides nothing, and no mask is the fast kernel
        banded = window is not None and run.above + run.own > window
        ends = None if image_ends is None else self._ends_within(run, image_ends)
        if run.above == 0 and not banded and leading is None and ends is None:
            return None
        # Runs of equal shape share a mask, and so do all layers. One with images is of its own.
        key = (run.own, run.above, window if banded else None, leading, None if ends is None else run.first)
        if key not in self._masks:
            # tril(above): row t is token above + t, so the diagonal lies `above` columns to the right
            seen = torch.ones(run.own, run.above + run.own, dtype=torch.bool, device=device).tril(run.above)
            if ends is not None:
                columns = torch.arange(-run.above, run.own, device=device)
                seen = seen | (columns <= ends.to(device)[:, None, :, None])
            mask = seen.triu(run.above + 1 - window) if banded and window is not None else seen
            self._masks[key] = pad(mask, (leading or 0, 0), value=True)
        return self._masks[key]

    def _ends_within(self, run: EqualSegments, image_ends: Tensor) -> Tensor | None:
        """Return the image ends of a run, counted from the start of each segment, [count, own]; None without images."""
        first = sum(self.lengths[: run.first])
        places = torch.arange(first, first + run.count * run.own)
        own = image_ends[places]
        if torch.equal(own, places):
            return None
        return (own - places).unflatten(0, (run.count, run.own)) + torch.arange(run.own)

    def index_keys(self, device: torch.device) -> VarlenIndex:
        """Return the positions of queries and keys for a kernel that processes all segments in a single call."""
        # computed once for all layers of a pass
        if self._varlen is None:
            ends = [0, *accumulate(self.lengths)]
            seen = [sum(self.lengths[a] for a in [*chain, i]) for i, chain in enumerate(self.chains)]
            self._varlen = VarlenIndex(
                keys=self._place_keys(ends).to(device) if self.are_shared else None,
                query_ends=torch.tensor(ends, dtype=torch.int32, device=device),
                key_ends=torch.tensor([0, *accumulate(seen)], dtype=torch.int32, device=device),
                longest_query=max(self.lengths),
                longest_key=max(seen),
            )
        return self._varlen

    def index_paths(self, device: torch.device) -> PathIndex:
        """Return the positions of whole sequences, for layers that read a sequence from its first token."""
        # computed once for all layers of a pass
        if self._paths is None:
            spans = torch.arange(sum(self.lengths)).split(self.lengths)
            rows = [torch.cat([spans[a] for a in [*chain, i]]) for i, chain in enumerate(self.chains)]
            width = max(map(len, rows))
            places = torch.stack([torch.cat([row, row[-1:].expand(width - len(row))]) for row in rows])
            # A shared segment has a row without its descendants, so that NaN in one of them stays there.
            ends = [number * width + len(row) for number, row in enumerate(rows)]
            back = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, self.lengths, strict=True)])
            self._paths = PathIndex(places=places.to(device), back=back.to(device))
        return self._paths

    def _place_keys(self, ends: list[int]) -> Tensor:
        """Return the row position of every key, on the CPU: a GPU would need a launch for every segment."""
        spans = [torch.arange(a, b) for a, b in pairwise(ends)]
        return torch.cat([spans[a] for i, chain in enumerate(self.chains) for a in [*chain, i]])
