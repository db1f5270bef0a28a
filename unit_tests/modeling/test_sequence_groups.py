"""Exchanges of the ranks that share rows: of these ranks alone, and each rank gets its heads, or its positions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from core.types.measures import ENTROPY, Measure
from modeling.forward import compute_states, forward
from modeling.sequence_parallel import RowSlice, SequenceGroup
from unit_tests.helpers.examples import families, with_kept
from unit_tests.helpers.models import random_model
from unit_tests.helpers.shared_prefixes import laid_out

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


class Threads:
    """torch.distributed for ranks that are threads of this process; the group of a rank is its number."""

    def __init__(self, size: int) -> None:
        self.barrier, self.held = Barrier(size, timeout=20), [torch.empty(0)] * size

    def share(self, rank: int, values: Tensor) -> list[Tensor]:
        self.held[rank] = values
        self.barrier.wait()
        every = list(self.held)
        self.barrier.wait()
        return every

    def all_to_all_single(self, came: Tensor, pieces: Tensor, group: int) -> None:
        came.copy_(torch.stack([own[group] for own in self.share(group, pieces)]))

    def all_reduce(self, values: Tensor, group: int) -> None:
        values.copy_(torch.stack(self.share(group, values.clone())).sum(0))


MEASURES = {**ENTROPY, "own": Measure(lambda s, at: s.exp().square().sum(-1) * at.column("rollout_logp"))}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "more", "is_kept"),
    [
        ("llama", {}, False),
        ("mistral", {"sliding_window": 5}, True),
        ("gemma2", {"attn_logit_softcapping": 1.0}, False),
        ("gpt_oss", EXPERTS, False),
    ],
)
def test_two_ranks_compute_the_numbers_and_gradients_of_one(monkeypatch, family, more, is_kept):
    groups = with_kept(families()) if is_kept else families()
    [batch] = laid_out(groups, "shared")
    whole = random_model(family, "by_sequence", num_attention_heads=4, num_key_value_heads=2, **more)
    with torch.no_grad():
        for name, p in whole.named_parameters():
            if "sinks" in name:
                p.normal_()

    def run(group: SequenceGroup | None) -> tuple[list[Tensor], list[Tensor], Tensor]:
        model = deepcopy(whole)  # its hooks are those of one pass
        settings = {"layout": "packed", "sequence_group": group}
        policy = forward(model, model, batch, temperature=0.7, measures=MEASURES, **settings)
        slope = torch.linspace(0.5, 1.5, len(batch.labels))
        loss = sum((slope * row).sum() for row in policy.list_tensors())
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        states = compute_states(model, model, batch, **settings)
        return policy.list_tensors(), [torch.zeros(1) if g is None else g for g in found], states

    rows, slopes, states = run(None)
    monkeypatch.setattr("modeling.sequence_parallel.distributed", Threads(2))
    with ThreadPoolExecutor(2) as pool:
        ranks = [*pool.map(run, [SequenceGroup(place=place, size=2, group=place) for place in range(2)])]
    for own, _, _ in ranks:
        for ours, theirs in zip(own, rows, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for want, *parts in zip(slopes, *(own for _, own, _ in ranks), strict=True):
        assert (sum(parts) - want).norm() <= 1e-4 * want.norm() + 1e-6
    order = torch.cat([torch.nonzero(batch.at // -(-len(batch.input_ids) // 2) == place)[:, 0] for place in range(2)])
    torch.testing.assert_close(torch.cat([own for _, _, own in ranks]), states[order], atol=1e-5, rtol=1e-4)
