"""Exchanges of the ranks that share rows: of these ranks alone, and each rank gets its heads, or its positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.sequence_parallel import RowSlice, SequenceGroup

OURS = "the ranks that share rows"


class Wire:
    """What torch.distributed does for one rank: it keeps what is sent, and gives what is to come."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.coming: Tensor | None = None
        self.groups: list[Any] = []

    def all_to_all_single(self, came: Tensor, pieces: Tensor, group: Any = None) -> None:
        assert came.is_contiguous() and pieces.is_contiguous() and came.shape == pieces.shape
        self.groups.append(group)
        self.sent.append(pieces.clone())
        came.copy_(pieces if self.coming is None else self.coming)

    def all_reduce(self, values: Tensor, group: Any = None) -> None:
        self.groups.append(group)
        self.sent.append(values.clone())
        values.mul_(3)


@pytest.fixture
def wire(monkeypatch) -> Wire:
    made = Wire()
    monkeypatch.setattr("modeling.sequence_parallel.distributed", made)
    return made


def test_every_exchange_is_of_the_ranks_that_share_rows(wire):
    group = SequenceGroup(place=1, size=2, group=OURS)
    q = torch.randn(1, 4, 3, 2, requires_grad=True)
    heads = group.to_heads(q, q, q)
    torch.autograd.grad(sum(x.sum() for x in heads), q)
    group.to_positions(heads[0].detach().transpose(1, 2))
    values, mine = torch.tensor([1.0, 2.0]), torch.tensor([False, True, True])
    assert group.sum(values).tolist() == [3.0, 6.0] and values.tolist() == [1.0, 2.0]
    assert group.gather(values[None], mine).tolist() == [[0.0, 3.0, 6.0]]
    assert wire.groups == [OURS] * 5
    assert [x.tolist() for x in wire.sent[3:]] == [[1.0, 2.0], [[0.0, 1.0, 2.0]]]
    assert group.slice_row(5) == RowSlice(place=1, size=2, total=5)


@pytest.mark.parametrize(
    ("size", "of_keys", "copies"), [(2, 2, 1), (2, 6, 1), (3, 3, 1), (4, 2, 2), (4, 1, 4), (2, 1, 2)]
)
def test_ranks_exchange_positions_for_heads_and_back(wire, size, of_keys, copies):
    """All ranks in turn. With fewer heads of keys than ranks, neighbours get the same."""
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, 2 * size, 3) for heads in (12, of_keys, of_keys)]
    groups = [SequenceGroup(place=place, size=size, group=OURS) for place in range(size)]

    def exchange(calls: list[Callable[[], Any]]) -> list[Any]:
        """Run each call to see what its rank sends, and once more with what all send it."""
        wire.sent, wire.coming = [], None
        for call in calls:
            call()
        pieces, done = list(wire.sent), []
        assert len(pieces) == size, "one exchange for queries, keys and values"
        for place, call in enumerate(calls):
            wire.coming = torch.stack([own[place] for own in pieces])
            done.append(call())
        return done

    def part(x: Tensor, place: int) -> Tensor:
        return x[:, :, 2 * place : 2 * place + 2]

    by_heads = exchange([lambda g=g: g.to_heads(*(part(x, g.place) for x in whole)) for g in groups])
    for place, own in enumerate(by_heads):
        for x, found in zip((whole[0], *(x.repeat_interleave(copies, 1) for x in whole[1:])), own, strict=True):
            assert torch.equal(found, x.unflatten(1, (size, -1))[:, place])
    attended = [q.transpose(1, 2) for q, _, _ in by_heads]
    back = exchange([lambda g=g: g.to_positions(attended[g.place]) for g in groups])
    for place, own in enumerate(back):
        assert torch.equal(own, part(whole[0], place).transpose(1, 2))
