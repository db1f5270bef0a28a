"""Ulysses sequence parallelism: the ranks of a group compute one packed row together (https://arxiv.org/abs/2309.14509).

    everywhere but in attention     each rank holds a slice of the row's positions, and all heads
    in attention                    each rank holds all positions, and a slice of the heads

One all-to-all before attention makes the second of the first, and one after it makes the first again. The attention
between them is that of one rank (modeling/attention.py), so windows and shared prefixes stay exact.

Position p of a row belongs to the rank with p in its slice, and so do the tokens whose logits come from p, wherever
they stand themselves. That rank computes their log-probabilities; `gather` gives them to the whole group, which
computes the same loss. In the backward pass a rank takes the gradient of its own ones, so over the ranks the gradients
of the weights add up to that of the row, each token counted once.
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
    """Slice of one rank, of a row of `total` positions; padding at the end of the row makes all slices equally wide.

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
        """Positions of every slice, padding included."""
        return -(-self.total // self.size)

    @property
    def begin(self) -> int:
        """First position."""
        return self.place * self.width

    @property
    def padding(self) -> int:
        """Positions that the whole row is padded with."""
        return self.size * self.width - self.total

    def take(self, row: Tensor, *, fill: int) -> Tensor:
        """Return this slice of a tensor [..., total]; `fill` is the value of padding."""
        return pad(row, (0, self.padding), value=fill)[..., self.begin : self.begin + self.width]

    def find_own(self, at: Tensor) -> Tensor:
        """Tell which of these positions of the row are in this slice."""
        return at // self.width == self.place


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """The ranks that compute every row together, as one of them sees them."""

    place: int
    """Number of this rank in the group, and of its slice."""
    size: int
    group: Any
    """Process group of torch.distributed."""

    def slice_row(self, total: int) -> RowSlice:
        return RowSlice(place=self.place, size=self.size, total=total)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange the positions of this rank for its heads: [1, H, T / size, D] -> [1, H / size, T, D] each.

        Where there are fewer heads of keys than ranks, several ranks get the same one.
        """
        copies = max(1, self.size // key.shape[1])
        parts = [query, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))]
        by_rank = [x[0].unflatten(0, (self.size, -1)) for x in parts]  # [size, H / size, T / size, D]
        came = _AllToAll.apply(torch.cat(by_rank, 1), self.group)
        heads = came.transpose(0, 1).flatten(1, 2)[None]
        q, k, v = heads.split([x.shape[1] for x in by_rank], 1)
        return q, k, v

    def to_positions(self, attended: Tensor) -> Tensor:
        """Exchange the heads of this rank for its positions: [1, T, H / size, D] -> [1, T / size, H, D]."""
        came = _AllToAll.apply(attended[0].unflatten(0, (self.size, -1)), self.group)
        return came.transpose(0, 1).flatten(1, 2)[None]

    def gather(self, own: Tensor, mine: Tensor) -> Tensor:
        """Return the values [..., M] of all tokens from those of this rank's.

        mine: which of the tokens are this rank's, [M] bool. The order stays.
        """
        return _Gather.apply(own, mine, self.group)


class _AllToAll(torch.autograd.Function):
    """Give piece i of a tensor [size, ...] to rank i, and return what came from each. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(pieces, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(pieces: Tensor, group: Any) -> Tensor:
    came = torch.empty_like(pieces, memory_format=torch.contiguous_format)
    distributed.all_to_all_single(came, pieces.contiguous(), group=group)
    return came


class _Gather(torch.autograd.Function):
    """Put together what the ranks hold. All of them compute the same loss of it, so no gradient is exchanged."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mine: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(mine)
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
