"""Shared beginnings are a matter of speed: every token gets the value and the gradient that it has by itself."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification

from configs.trainer_schema import LoraConfig
from modeling import attention
from modeling.attention import (
    BY_SEQUENCE,
    attend_by_sequence,
    attend_by_sequence_if_able,
)
from modeling.attention_varlen import attend_varlen, fits_varlen, gather_keys
from modeling.layout_probe import can_share_prefixes
from modeling.lora import with_adapter
from modeling.segments import Segments
from unit_tests.helpers.examples import families, siblings
from unit_tests.helpers.models import FAMILIES, random_model
from unit_tests.helpers.shared_prefixes import check_alike, laid_out, logp_of, marked, value_of, values_of

WINDOWED = ["gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3"]


def in_double(family: str, **more) -> nn.Module:
    """A random model of the family with this kernel, in float64."""
    return random_model(family, BY_SEQUENCE, **more).double().eval()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_computes_what_each_sample_has_alone(family):
    check_alike(in_double(family), families())


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])  # plain; capped scores; a scale of its own
def test_it_is_as_exact_in_float32(family):
    check_alike(random_model(family, BY_SEQUENCE).eval(), families(), tolerance=1e-5)


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("window", [3, 8])
def test_a_window_shorter_than_prompt_and_reply_is_kept_exactly(family, window):
    more = {"sliding_window": window}
    if family in ("qwen2", "qwen3"):
        more |= {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    model = in_double(family, **more)
    groups = marked(families())
    wide = in_double(family, **more | {"sliding_window": 64})
    rows = laid_out(groups, "shared")
    apart = values_of(model, rows, "packed", logp_of) - values_of(wide, rows, "packed", logp_of)
    assert apart.abs().max() > 0.01, "the window matters here"
    check_alike(model, groups)


@pytest.mark.parametrize("max_tokens", [21, 25, 30])
def test_a_group_that_is_cut_over_micro_batches_computes_the_same(max_tokens):
    groups = families()
    assert len(laid_out(groups, "shared", max_tokens=max_tokens)) > len(groups)
    check_alike(in_double("llama"), groups, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [40, 60, 10_000])
def test_rows_of_their_own_that_share_a_system_prompt_compute_the_same(max_tokens):
    groups = [[sample] for sample in siblings(random.Random(0), 20, [9, 12, 5, 12, 7])]
    assert any(len(batch.parents) > 2 for batch in laid_out(groups, "shared", max_tokens=max_tokens))
    check_alike(in_double("llama"), groups, max_tokens=max_tokens)


def test_segments_below_segments_share_three_times():
    """A tree of five levels: every second token of the reply is where somebody leaves."""
    [trunk] = siblings(random.Random(0), 4, [12])
    leaves = [
        replace(trunk, token_ids=np.concatenate([trunk.token_ids[:at], 63 - trunk.token_ids[at:]]))
        for at in (4, 6, 8, 10, 12)
    ]
    [batch] = laid_out([[trunk, *leaves]], "shared")
    assert max(len(chain) for chain in Segments.of_batch(batch).chains) == 5
    check_alike(in_double("qwen3"), [[trunk, *leaves]])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_that_are_computed_again_give_the_same_gradient(family):
    model = in_double(family).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_alike(model, families())


def test_an_adapter_gets_the_same_gradient(tiny_path):
    model = with_adapter(in_double("llama"), LoraConfig(r=4), path=tiny_path).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    assert can_share_prefixes(model)
    check_alike(model, families())


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"granite"}))
def test_values_are_those_of_each_sample_alone(family):
    config = in_double(family).config
    config.num_labels = 1
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa").double()
    nn.init.normal_(model.score.weight)
    attend_by_sequence_if_able(model)
    check_alike(model, families(), score=value_of)


@torch.no_grad()
def test_tokens_would_leak_between_replies_laid_in_one_segment():
    """What the tests above guard against is real: the same row as one sequence gives other numbers."""
    model = in_double("llama")
    [batch] = laid_out(families(), "shared")
    right = logp_of(model, batch, "packed")
    one = replace(
        batch,
        segment_ids=torch.zeros_like(batch.segment_ids),
        parents=torch.tensor([-1]),
        lengths=batch.lengths.sum()[None],
    )
    assert (logp_of(model, one, "packed") - right).abs().max() > 0.01


def test_a_mask_is_made_once_for_all_layers():
    segments = Segments([3, 2, 2, 5], [-1, 0, 0, 0])
    assert [(run.count, run.own, run.above) for run in segments.runs] == [(1, 3, 0), (2, 2, 3), (1, 5, 3)]
    first, second, third = (segments.find_mask(run, None, torch.device("cpu")) for run in segments.runs)
    assert first is None and second.tolist() == [[True] * 4 + [False], [True] * 5] and third.shape == (5, 8)
    assert segments.find_mask(segments.runs[1], None, torch.device("cpu")) is second
    assert segments.find_mask(segments.runs[1], 2, torch.device("cpu")).tolist() == [
        [False, False, True, True, False],
        [False, False, False, True, True],
    ]


def test_the_index_of_keys_is_the_whole_sequence_of_every_segment():
    """What the kernel on a GPU takes, in one call for the row."""
    index = Segments([3, 1, 2, 2], [-1, 0, 0, 2]).index_keys(torch.device("cpu"))
    assert index.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 4, 5, 6, 7]
    assert index.query_ends.tolist() == [0, 3, 4, 6, 8] and index.key_ends.tolist() == [0, 3, 7, 12, 19]
    assert (index.longest_query, index.longest_key) == (3, 7)
    plain = Segments([3, 2], [-1, -1]).index_keys(torch.device("cpu"))
    assert plain.keys is None and plain.key_ends.tolist() == plain.query_ends.tolist() == [0, 3, 5]


class Made(TorchDispatchMode):
    """Count the operations whose result is on the meta device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.count += isinstance(made, torch.Tensor) and made.is_meta
        return made


@pytest.mark.parametrize("parent", [-1, 0])
def test_an_index_takes_no_launch_for_every_segment(parent):
    with Made() as made:
        Segments([2] * 64, [-1, *[parent] * 63]).index_keys(torch.device("meta"))
    assert made.count <= 3, "ends of queries, ends of keys, and keys where they are shared"


def varlen_by_hand(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch's documentation and comments say of varlen_attn, whose kernel runs on a GPU only."""
    left, right = window_size
    assert right == 0 and max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    done = []
    for n, seen, q_end, k_end in zip(cu_seq_q.diff(), cu_seq_k.diff(), cu_seq_q[1:], cu_seq_k[1:], strict=True):
        places = (query, q_end, n), (key, k_end, seen), (value, k_end, seen)
        q, k, v = (x[end - m : end].transpose(0, 1) for x, end, m in places)
        behind = torch.arange(seen - n, seen)[:, None] - torch.arange(seen)[None, :]
        allowed = (behind >= 0) & ((behind <= left) | (left < 0))
        scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        done.append((weights @ v.repeat_interleave(len(q) // len(v), 0)).transpose(0, 1))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return torch.cat(done)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("parents", [[-1, -1, -1, -1], [-1, 0, 0, 1]])
def test_the_call_for_a_gpu_means_what_the_kernel_of_a_cpu_computes(monkeypatch, parents, window):
    """The kernel itself is compared in test_gpu.py; here its arguments are, by what they are documented to mean."""
    segments = Segments([11, 6, 6, 17], parents)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 40, 8, dtype=torch.float64) for heads in (4, 2, 2))
    layer = partial(attend_by_sequence, nn.Identity(), query, key, value, None, scaling=0.3, segments=segments)
    want, _ = layer(sliding_window=window)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_hand)
    monkeypatch.setattr(attention, "fits_varlen", lambda query, value: True)
    got, _ = layer(sliding_window=window)
    torch.testing.assert_close(got, want)


class SumsOfRows(TorchDispatchMode):
    """Record the dtypes in which gradients of gathered rows are added up."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith(("aten::index_add", "aten::index_put")):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_gradients_of_a_prompt_of_many_replies_add_up_in_float32():
    """A CPU adds in float32 anyway, and rounds once; a GPU adds in the dtype that it gets."""
    keys = Segments([4, *[2] * 64], [-1, *[0] * 64]).index_keys(torch.device("cpu")).keys
    torch.manual_seed(0)
    x = torch.randn(132, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    slope = torch.randn(len(keys), 2, 8, dtype=torch.bfloat16)
    gathered = gather_keys(x, keys)
    assert torch.equal(gathered, x[keys])
    with SumsOfRows() as sums:
        [got] = torch.autograd.grad(gathered, x, slope)
    assert sums.dtypes == {torch.float32}
    want = torch.zeros(132, 2, 8, dtype=torch.float64).index_add_(0, keys, slope.double())
    assert torch.equal(got, want.bfloat16())


def test_torch_takes_the_arguments_of_the_call_for_a_gpu():
    query, key = (torch.empty(1, heads, 40, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    for parents in ([-1, -1, -1, -1], [-1, 0, 0, 1]):
        segments = Segments([11, 6, 6, 17], parents)
        assert attend_varlen(query, key, key, segments, scaling=None, window=3).shape == (1, 40, 4, 64)
    assert not fits_varlen(query, query), "it is not on a GPU"


def test_a_segment_cannot_continue_a_later_one():
    with pytest.raises(ValueError, match="segment 0 continues segment 1"):
        Segments([1, 1], [1, -1])


@pytest.mark.parametrize(("attention", "layout"), [("sdpa", "packed"), ("eager", "packed"), (BY_SEQUENCE, "padded")])
def test_rows_that_share_are_refused_where_the_kernel_cannot(attention, layout):
    [batch] = laid_out(families(), "shared")
    with pytest.raises(ValueError, match=r"set trainer\.share_prefixes=off"):
        logp_of(random_model("llama", attention), batch, layout)
