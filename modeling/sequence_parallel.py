"""Ulysses sequence parallelism: the ranks of a group compute a packed row together (https://arxiv.org/abs/2309.14509).

    outside attention     each rank has a slice of the row's positions, and all heads
    in attention          each rank has all positions, and a slice of the heads

An all-to-all before attention converts the first to the second, and another after it converts back. The attention in
between is the single-rank kernel (modeling/attention.py), so windows and shared prefixes stay exact.

Position p belongs to the rank with p in its slice, as do the tokens predicted at p, whatever their own position. That
rank computes their log-probabilities; `gather` distributes them to the whole group, which computes the same loss. In
the backward pass a rank keeps only the gradient of its own tokens. Summed over the ranks, the gradient of the weights
is that of the row, with each token counted once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """Slice of a row of `total` positions for a rank; the row is padded at the end to equal slices.

    >>> [RowSlice(place=place, size=2, total=5).begin for place in (0, 1)]
    [0, 3]
    """

    place: int
    """Number of the slice."""
    size: int
    """Number of slices."""
    total: int

    @property
    def width(self) -> int:
        """Positions per slice, padding included."""
        return -(-self.total // self.size)

    @property
    def begin(self) -> int:
        """First position."""
        return self.place * self.width

    @property
    def padding(self) -> int:
        """Positions added to the whole row."""
        return self.size * self.width - self.total

    def take(self, row: Tensor, *, fill: int) -> Tensor:
        """Return this slice of a tensor [..., total], padded with `fill`."""
        return pad(row, (0, self.padding), value=fill)[..., self.begin : self.begin + self.width]

    def find_own(self, at: Tensor) -> Tensor:
        """Return a mask of the positions that are in this slice."""
        return at // self.width == self.place


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """Group of ranks that compute every row together, seen from one of them."""

    place: int
    """Number of this rank in the group, and of its slice."""
    size: int
    group: Any
    """Process group of torch.distributed."""

    def slice_row(self, total: int) -> RowSlice:
        return RowSlice(place=self.place, size=self.size, total=total)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange positions of this rank for heads: [1, H, T / size, D] -> [1, H / size, T, D] each.

        With fewer key heads than ranks, several ranks get the same head.
        """
        copies = max(1, self.size // key.shape[1])
        parts = [query, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))]
        # squeeze, not [0]: the gradient of an index would be a copy
        by_rank = [x.squeeze(0).unflatten(0, (self.size, -1)) for x in parts]  # [size, H / size, T / size, D]
        # a single exchange for queries, keys and values, since each collective waits for the slowest rank
        came = _AllToAll.apply(torch.cat(by_rank, 1), self.group)
        heads = came.transpose(0, 1).flatten(1, 2)[None]
        q, k, v = heads.split([x.shape[1] for x in by_rank], 1)
        return q, k, v

    def to_positions(self, attended: Tensor) -> Tensor:
        """Exchange heads of this rank for positions: [1, T, H / size, D] -> [1, T / size, H, D]."""
        came = _AllToAll.apply(attended.squeeze(0).unflatten(0, (self.size, -1)), self.group)
        return came.transpose(0, 1).flatten(1, 2)[None]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the ranks, without gradient."""
        total = values.clone()
        distributed.all_reduce(total, group=self.group)
        return total

    def gather(self, own: Tensor, mine: Tensor) -> Tensor:
        """Collect the values [..., M] of all tokens from the ranks.

        mine: [M] bool, True for this rank's tokens. The order is kept.
        """
        return _Gather.apply(own, mine, self.group)


class _AllToAll(torch.autograd.Function):
    """All-to-all: send piece i of a tensor [size, ...] to rank i, return the received pieces. Self-transpose."""

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(pieces, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # sending piece i to rank i twice restores the order, so the exchange is its own transpose
        return _exchange(grad, ctx.group), None


def _exchange(pieces: Tensor, group: Any) -> Tensor:
    came = torch.empty_like(pieces, memory_format=torch.contiguous_format)
    distributed.all_to_all_single(came, pieces.contiguous(), group=group)
    return came


class _Gather(torch.autograd.Function):
    """Collect values of all ranks. No gradient is exchanged, because all ranks compute the same loss from them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mine: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(mine)
        # zeros at the tokens of other ranks: a sum over the ranks then collects values without their positions
        whole = own.new_zeros(*own.shape[:-1], len(mine))
        whole[..., mine] = own
        if len(mine):  # the same on all ranks
            distributed.all_reduce(whole, group=group)  # adding zeros changes no bit
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        [mine] = ctx.saved_tensors
        return grad[..., mine], None, None
