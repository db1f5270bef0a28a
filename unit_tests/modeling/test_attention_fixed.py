"""Attention in fixed order against a plain softmax over what a query may see, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from modeling.attention_fixed import attend_blocks, attend_in_fixed_order
from modeling.attention_scores import Scores
from modeling.segments import Segments

SIZE = 4


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, begin: int, scores: Scores) -> Tensor:
    """[H, n, D] queries from position `begin` on, [Hkv, m, D] keys and values -> [H, n, Dv]."""
    each = len(q) // len(k)
    done = torch.empty(*q.shape[:2], v.shape[-1], dtype=v.dtype)
    for head in range(len(q)):
        for t in range(q.shape[1]):
            first = 0 if scores.window is None else max(0, begin + t + 1 - scores.window)
            seen = slice(first, begin + t + 1)
            products = k[head // each, seen] @ q[head, t] * (SIZE**-0.5 if scores.scaling is None else scores.scaling)
            if scores.cap is not None:
                products = scores.cap * (products / scores.cap).tanh()
            done[head, t] = products.softmax(0) @ v[head // each, seen]
    return done


SCORES = st.builds(
    Scores,
    scaling=st.sampled_from([None, 1.5]),
    window=st.sampled_from([None, 1, 3, 9]),
    cap=st.sampled_from([None, 0.8]),
)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.lists(st.integers(0, 19), min_size=1, max_size=3), SCORES)
def test_a_query_sees_all_tokens_up_to_its_own(n, begins, scores):
    """Rows begin at places of their own in the keys; heads share keys by twos, and values are wider than keys."""
    m = max(begins) + n
    q, k, v = draw(len(begins), 4, n, SIZE), draw(len(begins), 2, m, SIZE), draw(len(begins), 2, m, 5)
    got = attend_blocks(q, k, v, begins=torch.tensor(begins), scores=scores, key_block=4)
    for row, begin in enumerate(begins):
        torch.testing.assert_close(got[row], attend_plainly(q[row], k[row], v[row], begin, scores))


@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_a_cache_are_padded_on_the_left(window):
    """All tokens, or the last of each row: the numbers are those of the rows without padding."""
    lengths, m = [7, 3, 5], 7
    q, k, v = draw(3, 2, m, SIZE), draw(3, 2, m, SIZE) - 1, draw(3, 2, m, SIZE) + 1
    mask = torch.tensor([[0] * (m - n) + [1] * n for n in lengths])
    attend = attend_in_fixed_order
    given = {"sliding_window": window, "scaling": 0.7, "softcap": 2.0}
    whole, _ = attend(nn.Identity(), q, k, v, mask, **given)
    last, _ = attend(nn.Identity(), q[:, :, -1:], k, v, mask, **given)
    scores = Scores(scaling=0.7, window=window, cap=2.0)
    for row, n in enumerate(lengths):
        want = attend_plainly(q[row, :, m - n :], k[row, :, m - n :], v[row, :, m - n :], 0, scores)
        torch.testing.assert_close(whole[row, m - n :].transpose(0, 1), want)
        torch.testing.assert_close(last[row].transpose(0, 1), want[:, -1:])
    full, _ = attend(nn.Identity(), q[:1, :, -1:], k[:1], v[:1], None, **given)
    assert torch.equal(full, last[:1])
    for queries, shown in ((q[:, :, :2], mask), (q, mask[:, None])):
        with pytest.raises(ValueError) as refused:
            attend(nn.Identity(), queries, k, v, shown)
        found = f"found {queries.shape[2]} of 7"
        assert str(refused.value) == f"attention fixed_order takes all tokens or the last, {found}"


@pytest.mark.parametrize("shared", [False, True])
def test_segments_of_a_row_have_values_and_gradients_of_their_own(shared):
    segments = Segments([3, 2, 2, 4], [-1, 0, 0, -1] if shared else [-1] * 4)
    q, k, v = ((draw(1, heads, 11, SIZE) + n).requires_grad_() for n, heads in enumerate((4, 2, 2)))
    got, _ = attend_in_fixed_order(nn.Identity(), q, k, v, None, segments=segments, sliding_window=4, softcap=3.0)
    scores, parts, places = (
        Scores(scaling=None, window=4, cap=3.0),
        list[Tensor](),
        torch.arange(11).split([3, 2, 2, 4]),
    )
    for own, above in zip(places, [0, 3, 3, 0] if shared else [0] * 4, strict=True):
        path = torch.cat([torch.arange(above), own])
        parts.append(attend_plainly(q[0][:, own], k[0][:, path], v[0][:, path], above, scores))
    want = torch.cat(parts, 1).transpose(0, 1)[None]
    torch.testing.assert_close(got, want)
    slope = draw(*got.shape)
    for mine, theirs in zip(*(torch.autograd.grad(x, (q, k, v), slope) for x in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("given", [{"s_aux": torch.zeros(1)}, {"dropout": 0.1}, {"position_bias": 1}])
def test_what_it_does_not_compute_is_refused(given):
    x = draw(1, 1, 2, SIZE)
    with pytest.raises(ValueError) as refused:
        attend_in_fixed_order(nn.Identity(), x, x, x, None, **given)
    assert str(refused.value) == (
        f"attention fixed_order does not compute {next(iter(given))}, which Identity asks for"
    )
    with pytest.raises(ValueError) as refused:
        attend_in_fixed_order(nn.Identity(), x, x, x, None, is_causal=False)
    assert str(refused.value) == "attention fixed_order is causal, and Identity is not"
