"""Ragged sets of a sample's tokens and of a batch's: cut, joined, moved and restricted to."""

import pickle

import numpy as np
import pytest
import torch

from core.errors import RunStopped, UserError
from core.types.allowed_tokens import EVERY_TOKEN
from core.types.kept_sets import KeptSets, KeptTokens

LISTS = [[], [3, 5], [1], [], [0, 2, 7, 9]]


def lists_of(sets: KeptSets) -> list[list[int]]:
    return [sets.ids[a:b].tolist() for a, b in zip(sets.offsets[:-1], sets.offsets[1:], strict=True)]


def test_taking_and_joining_are_those_of_lists():
    sets = KeptSets.of_lists(LISTS)
    assert lists_of(sets) == LISTS and len(sets) == 5 and sets.sizes.tolist() == [0, 2, 1, 0, 4]
    order = np.array([4, 0, 4, 2, 1])
    assert lists_of(sets.take(order)) == [LISTS[i] for i in order]
    assert lists_of(sets.take(np.array([], dtype=np.int64))) == []
    joined = KeptSets.join([sets, KeptSets.none(2), sets])
    assert lists_of(joined) == [*LISTS, [], [], *LISTS]
    assert joined == KeptSets.of_lists([*LISTS, [], [], *LISTS]) != sets
    assert sets.contain(np.array([3, 5, 2, 1, 9])).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize("offsets", [[1, 2], [0, 1], [0, 2, 1, 2], []])
def test_wrong_offsets_are_refused(offsets):
    with pytest.raises(UserError, match="must rise from 0"):
        KeptSets(ids=np.array([4, 5], dtype=np.int32), offsets=np.array(offsets, dtype=np.int32))


def kept_tokens(lists) -> KeptTokens:
    return KeptTokens.of(KeptSets.of_lists(lists))


def test_a_pickle_holds_no_copy_and_comes_back():
    sets = kept_tokens([[1] * 5000])
    buffers = []
    data = pickle.dumps(sets, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1000 and len(buffers) == 3
    back = pickle.loads(data, buffers=buffers)
    assert torch.equal(back.ids, sets.ids) and torch.equal(back.offsets, sets.offsets)


@pytest.mark.parametrize("tokens", [slice(0, 3), slice(1, 2), slice(2, 2), torch.tensor([True, False, True])])
def test_the_softmax_over_own_sets_is_that_of_each_token(tokens):
    torch.manual_seed(0)
    lists, labels = [[3, 5], [1], [0, 2, 7, 9]], torch.tensor([5, 1, 7])
    logits = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    chosen = kept_tokens(lists).select(tokens)
    restricted = chosen.restrict(logits[tokens], 0.7)
    found = restricted.log_softmax(-1).gather(-1, chosen.to_columns(labels[tokens])[:, None])[:, 0]
    rows = torch.arange(3)[tokens].tolist()
    want = [(logits[r, lists[r]] / 0.7).log_softmax(-1)[lists[r].index(int(labels[r]))] for r in rows]
    torch.testing.assert_close(found, torch.stack(want) if want else found, rtol=1e-14, atol=0)
    [grad] = torch.autograd.grad(found.sum(), logits)
    outside = torch.ones(3, 10, dtype=torch.bool)
    for r in rows:
        outside[r, lists[r]] = False
    assert not grad[outside].any(), "exactly 0"


def test_a_token_without_a_set_is_scored_over_all_tokens():
    torch.manual_seed(0)
    sets, labels = kept_tokens([[3, 5], [], [0]]), torch.tensor([5, 1, 0])
    logits = torch.randn(3, 10)
    found = sets.restrict(logits, 0.7).log_softmax(-1).gather(-1, sets.to_columns(labels)[:, None])[:, 0]
    free = EVERY_TOKEN.restrict(logits, 0.7).log_softmax(-1)
    want = [(logits[0, [3, 5]] / 0.7).log_softmax(-1)[1], free[1, 1], torch.tensor(0.0)]
    torch.testing.assert_close(found, torch.stack(want))
    sets.check_labels(labels)


def test_a_label_outside_its_own_set_stops_the_run():
    sets = kept_tokens([[3, 5], [1, 4]])
    sets.check_labels(torch.tensor([3, 4]))
    with pytest.raises(RunStopped, match=r"token 3, which is not in its own kept set \(rollout.top_p"):
        sets.check_labels(torch.tensor([3, 3]))  # 3 is in the other's
