"""Attention kernels by themselves: their names in transformers, what they take and refuse, and half precision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from core.patches import read_attention
from modeling.attention import BY_SEQUENCE, attend_by_sequence, attend_by_sequence_if_able, set_attention
from modeling.attention_fixed import attend_blocks, attend_in_fixed_order, use_fixed_order
from modeling.attention_scores import Scores
from modeling.attention_varlen import attend_varlen, fits_varlen
from modeling.fixed_order import fixed_order
from modeling.image_blocks import ImageEnds
from modeling.patches import TorchDispatchMode
from modeling.segments import Segments
from unit_tests.helpers import seeing
from unit_tests.helpers.models import random_model

IDS = torch.tensor([[5, 9, 3, 7], [8, 2, 4, 6]])
IGNORED = (
    *("position_ids", "cache_position", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("name", IGNORED)
def test_an_argument_without_effect_changes_nothing(name):
    x = draw(1, 2, 3, 8)
    for attend in (attend_by_sequence, attend_in_fixed_order):
        plain, _ = attend(nn.Identity(), x, x, x, None)
        assert torch.equal(attend(nn.Identity(), x, x, x, None, **{name: 1})[0], plain)
        assert torch.equal(attend(nn.Identity(), x, x, x, None, other=None)[0], plain)


def test_a_mask_of_a_single_token_is_a_mask():
    x = draw(1, 1, 1, 8)
    with pytest.raises(ValueError, match="neither a mask nor a cache"):
        attend_by_sequence(nn.Identity(), x, x, x, torch.ones(1, 1, 1, 1))
    torch.testing.assert_close(attend_by_sequence(nn.Identity(), x, x, x, torch.ones(0, 0, 0, 0))[0], x)


@torch.no_grad()
def test_a_model_is_given_the_attention_by_its_name():
    wanted = random_model("llama", num_hidden_layers=1)(IDS).logits
    for name, found in (("sdpa", BY_SEQUENCE), ("eager", BY_SEQUENCE), ("fixed_order", "fixed_order")):
        model = random_model("llama", num_hidden_layers=1)
        if name == "fixed_order":
            use_fixed_order(model)
        else:
            set_attention(model, name)
        assert read_attention(model.config) == name
        attend_by_sequence_if_able(model)
        assert read_attention(model.config) == found
        torch.testing.assert_close(model(IDS).logits, wanted, atol=1e-5, rtol=1e-4)
    chunked = random_model("llama", num_hidden_layers=1, attention_chunk_size=8)
    attend_by_sequence_if_able(chunked)
    assert read_attention(chunked.config) == "sdpa"


def test_only_the_language_part_gets_the_attention():
    for family in ("idefics3", "qwen2_5_vl"):
        model: Any = seeing.make_model(family)
        attend_by_sequence_if_able(model)
        parts = (model.config.get_text_config(), model.config.vision_config)
        assert [read_attention(part) for part in parts] == [BY_SEQUENCE, "sdpa"]
        set_attention(model, "eager")
        assert [read_attention(part) for part in parts] == ["eager", "sdpa"]


def test_an_attention_that_is_registered_under_the_name_stays():
    """trainers/compiled.py registers one that is opaque to the compiler."""
    model = random_model("llama", BY_SEQUENCE, num_hidden_layers=1)
    usual = AttentionInterface()[BY_SEQUENCE]

    def other(*given: Any, **settings: Any) -> Any:
        return attend_by_sequence(*given, **settings)

    AttentionInterface.register(BY_SEQUENCE, other)
    try:
        set_attention(model, BY_SEQUENCE)
        assert AttentionInterface()[BY_SEQUENCE] is other
    finally:
        AttentionInterface.register(BY_SEQUENCE, usual)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "width", "values", "capability", "fits"),
    [
        ("cuda", BF16, 64, 64, (8, 0), True),
        ("cuda", F16, 256, 256, (9, 0), True),
        ("cuda", BF16, 8, 8, (12, 1), True),
        ("cpu", BF16, 64, 64, (8, 0), False),
        ("cuda", F32, 64, 64, (8, 0), False),
        ("cuda", BF16, 60, 60, (8, 0), False),
        ("cuda", BF16, 264, 264, (8, 0), False),
        ("cuda", BF16, 64, 32, (8, 0), False),
        ("cuda", BF16, 64, 64, (7, 5), False),
    ],
)
def test_flash_attention_is_for_half_precision_on_a_recent_gpu(
    monkeypatch, device, dtype, width, values, capability, fits
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", {torch.device("cuda"): capability}.__getitem__)
    query, value = (
        SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 2, 5, n)) for n in (width, values)
    )
    found: Any = fits_varlen
    assert found(query, value) == fits


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_is_called_with_the_borders_of_segments(monkeypatch, shared, window):
    segments = Segments([3, 2, 4], [-1, 0, 0] if shared else [-1] * 3)
    seen: dict[str, Any] = {}

    def varlen_attn(q, k, v, q_ends, k_ends, most_q, most_k, *, scale, window_size, enable_gqa=False):
        seen.update(q=q, k=k, v=v, ends=(q_ends.tolist(), k_ends.tolist()), most=(most_q, most_k), scale=scale)
        seen.update(window=window_size, gqa=enable_gqa)
        assert all(x.is_contiguous() for x in (q, k, v))
        return q * 2

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    query, key, value = draw(1, 4, 9, 8), draw(1, 2, 9, 8), draw(1, 2, 9, 8) + 1
    done = attend_varlen(query, key, value, segments, scaling=0.3, window=window)
    assert torch.equal(done, 2 * query.transpose(1, 2))
    places = [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8] if shared else [*range(9)]
    assert torch.equal(seen["q"], query[0].transpose(0, 1))
    assert torch.equal(seen["k"], key[0].transpose(0, 1)[places])
    assert torch.equal(seen["v"], value[0].transpose(0, 1)[places])
    assert seen["ends"] == ([0, 3, 5, 9], [0, 3, 8, 15] if shared else [0, 3, 5, 9])
    assert seen["most"] == (4, 7 if shared else 4) and seen["scale"] == 0.3 and seen["gqa"] is True
    assert seen["window"] == ((-1, 0) if window is None else (3, 0))
    attend_varlen(key, key, value, segments, scaling=None, window=None)
    assert seen["gqa"] is False and seen["scale"] is None


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_attention_in_fixed_order_adds_in_float32(dtype):
    """The values are those of float32, rounded once; the gradient is that of the usual attention."""
    scores = Scores(scaling=0.4, window=3, cap=2.0)
    q, k, v = (draw(2, heads, 11, 8, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    begins = torch.tensor([0, 0])
    got = attend_blocks(q, k, v, begins=begins, scores=scores, key_block=4)
    exact = attend_blocks(q.double(), k.double(), v.double(), begins=begins, scores=scores, key_block=16)
    assert got.dtype == dtype and not got.requires_grad
    torch.testing.assert_close(got.double(), exact, atol=1e-6, rtol=2**-8 if dtype == BF16 else 1e-5)
    given: dict[str, Any] = {"scaling": 0.4, "sliding_window": 3, "softcap": 2.0}
    fixed, _ = attend_in_fixed_order(nn.Identity(), q, k, v, None, key_block=4, **given)
    assert torch.equal(fixed.transpose(1, 2), got)
    usual, _ = attend_by_sequence(nn.Identity(), q, k, v, None, **given)
    slope = draw(*usual.shape, dtype=dtype)
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, k, v), slope) for x in (fixed, usual)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_an_image_see_each_other_in_both_directions(window):
    """Tokens 1 to 3 of the first sequence are an image; its layer may say that images count with a window only."""
    q, k, v = draw(1, 4, 7, 8), draw(1, 2, 7, 8), draw(1, 2, 7, 8) + 1
    ends, at = torch.tensor([0, 3, 3, 3, 4, 5, 6]), torch.arange(7)
    segments = Segments([5, 2], [-1, -1])
    for in_windows_only in (False, True):
        images = ImageEnds(ends=ends, in_windows_only=in_windows_only)
        last = at if in_windows_only and window is None else ends
        seen = (at[None] <= last[:, None]) & ((at[:, None] < 5) == (at[None] < 5))
        if window is not None:
            seen &= at[None] > at[:, None] - window
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ keys.mT * 8**-0.5).masked_fill(~seen, -torch.inf)
        want = (scores.softmax(-1) @ values).transpose(1, 2)
        given: dict[str, Any] = {"sliding_window": window}
        got, _ = attend_by_sequence(nn.Identity(), q, k, v, None, segments=segments, image_ends=images, **given)
        torch.testing.assert_close(got, want)
        images = ImageEnds(ends=ends[:5], in_windows_only=in_windows_only)
        first, _ = attend_by_sequence(
            nn.Identity(), q[:, :, :5], k[:, :, :5], v[:, :, :5], None, image_ends=images, **given
        )
        torch.testing.assert_close(first, want[:, :5])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("segments", [None, Segments([30, 7, 12], [-1, 0, 0])])
def test_half_precision_on_a_cpu_is_computed_in_float32(dtype, segments):
    """The result and the gradients are those of float32, rounded once."""
    half = [draw(1, heads, 49, 16, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]
    full = [x.detach().float().requires_grad_() for x in half]
    attended: list[Tensor] = []
    for given in (half, full):
        got, _ = attend_by_sequence(nn.Identity(), *given, None, segments=segments)
        assert got.dtype == given[0].dtype
        got.backward(draw(1, 49, 4, 16, dtype=dtype).to(got))
        attended.append(got)
    assert torch.equal(attended[0], attended[1].to(dtype))
    for got, want in zip(half, full, strict=True):
        assert got.grad is not None and want.grad is not None
        assert torch.equal(got.grad, want.grad.to(dtype))


def test_a_sink_makes_queries_wider_by_what_fast_kernels_take(monkeypatch):
    widths: list[tuple[int, ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        widths.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return scaled_dot_product_attention(q, k, v, **given)

    monkeypatch.setattr("modeling.attention_scores.scaled_dot_product_attention", attend)
    x = draw(1, 2, 3, 16)
    attend_by_sequence(nn.Identity(), x, x, x, None, s_aux=torch.zeros(2))
    attend_by_sequence(nn.Identity(), x, x, x, None)
    assert widths == [(24, 24, 24), (16, 16, 16)]


class Products(TorchDispatchMode):
    """Shapes of the matrices of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.first: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.shapes |= {tuple(x.shape[1:]) for x in args}
            self.first.append(args[0])
        return func(*args, **kwargs or {})


def test_every_product_in_fixed_order_has_one_shape_at_any_length():
    """Tiles of 8 positions and two heads; blocks of 64 keys."""
    with Products() as seen:
        for n in (1, 3, 9, 70):
            attend_in_fixed_order(nn.Identity(), draw(1, 4, n, 8), draw(1, 2, n, 8), draw(1, 2, n, 6), None)
    assert seen.shapes == {(16, 8), (8, 64), (16, 64), (64, 6)}
    model = random_model("llama", num_hidden_layers=1)
    for given, block in (({"key_block": 16}, 16), ({}, 64)):
        use_fixed_order(model, **given)
        with torch.no_grad(), Products() as seen:
            model(IDS)
        of_attention = {shape for shape in seen.shapes if 1 not in shape}  # the others are of positions
        assert of_attention == {(16, 32), (32, block), (16, block), (block, 32)}


@pytest.mark.parametrize(("begin", "rows"), [(0, [0, 1]), (3, [6, 7]), (7, [14, 15]), (8, [0, 1]), (19, [6, 7])])
def test_a_position_has_its_place_in_the_tile_by_itself(begin, rows):
    """Position modulo 8, for each of two heads: the same when a token is decoded as in a whole row."""
    with Products() as seen:
        attend_blocks(
            *(draw(1, 2, 1, 8), draw(1, 1, 20, 8), draw(1, 1, 20, 8)),
            begins=torch.tensor([begin]),
            scores=Scores(scaling=None, window=None),
        )
    assert seen.first[0].any(-1).nonzero()[:, 1].tolist() == rows


def test_fixed_order_has_one_thread_and_gives_the_others_back():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyError), fixed_order():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_a_mask_of_padding_reaches_the_kernels():
    """Without their names in transformers' masks it would be left out in silence."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    wanted = random_model("llama", num_hidden_layers=1)(IDS, attention_mask=mask).logits
    model = random_model("llama", num_hidden_layers=1)
    use_fixed_order(model)
    torch.testing.assert_close(model(IDS, attention_mask=mask).logits[mask > 0], wanted[mask > 0], atol=1e-5, rtol=1e-4)
    set_attention(model, BY_SEQUENCE)
    with pytest.raises(ValueError, match="neither a mask nor a cache"):
        model(IDS, attention_mask=mask)


@pytest.mark.parametrize(
    ("lengths", "parents"),
    [([3, 2, 2, 4], [-1, 0, 0, 1]), ([3, 2, 2, 4], [-1, -1, -1, -1]), ([1, 1, 1], [-1, 0, 1]), ([2, 3], [-1, -1])],
)
@pytest.mark.parametrize("given", [{}, {"sliding_window": 3}, {"softcap": 0.7}], ids=str)
def test_a_segment_has_the_keys_of_its_ancestors_and_its_own(lengths, parents, given):
    q, k, v = draw(1, 4, sum(lengths), 8), draw(1, 2, sum(lengths), 8), draw(1, 2, sum(lengths), 8) + 1
    got, none = attend_by_sequence(nn.Identity(), q, k, v, None, segments=Segments(lengths, parents), **given)
    assert none is None and got.shape == (1, sum(lengths), 4, 8)
    own, paths = torch.arange(sum(lengths)).split(lengths), list[Tensor]()
    for place, parent in zip(own, parents, strict=True):
        path = torch.cat([*([paths[parent]] if parent >= 0 else []), place])
        paths.append(path)
        alone, _ = attend_by_sequence(nn.Identity(), q[:, :, path], k[:, :, path], v[:, :, path], None, **given)
        torch.testing.assert_close(got[:, place], alone[:, -len(place) :])


def test_the_gradient_of_a_segment_is_a_view_of_its_rows():
    """The gradient of an index is a copy, which took 7 % of a DPO update on a CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        q, k = draw(1, 4, 11, 8).requires_grad_(), draw(1, 2, 11, 8).requires_grad_()
        # a run of one segment, a run of two
        out, _ = attend_by_sequence(nn.Identity(), q, k, k, None, segments=Segments([5, 3, 3], [-1, 0, 0]))
        out.sum().backward()
    called = {event.name for event in seen.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in called
    assert "aten::select_backward" not in called


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_heads_share_keys_in_any_number_of_rows(rows):
    q, k, v = draw(rows, 4, 3, 8), draw(rows, 2, 3, 8), draw(rows, 2, 3, 8) + 1
    want = scaled_dot_product_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), is_causal=True)
    torch.testing.assert_close(attend_by_sequence(nn.Identity(), q, k, v, None)[0], want.transpose(1, 2))
    capped, _ = attend_by_sequence(nn.Identity(), q, k, v, None, softcap=1e4)
    torch.testing.assert_close(capped, want.transpose(1, 2), atol=1e-4, rtol=1e-4)
    sunk, _ = attend_by_sequence(nn.Identity(), q, k, v, None, s_aux=torch.full((4,), -1e4))
    torch.testing.assert_close(sunk, want.transpose(1, 2))
