"""The layout of a model is measured: packed rows where they are exact, and padded rows where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

from core.errors import UserError
from modeling.attention import BY_SEQUENCE, attend_by_sequence_if_able
from modeling.forward import forward
from modeling.image_blocks import ImageEnds
from modeling.layout_probe import LayoutProbe, can_share_prefixes, find_probe, layout_for, probe_layout
from modeling.load import load_scalar_model
from modeling.paths import find_mixers, list_layers
from modeling.probe_rows import draw_segments, list_sequences, make_batch, make_shared_batch
from modeling.segments import Segments
from unit_tests.helpers.examples import families
from unit_tests.helpers.models import random_model
from unit_tests.helpers.seeing import make_model
from unit_tests.helpers.shared_prefixes import check_alike

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
DELTA: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
DELTA |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
CHUNKED = EXPERTS | {"intermediate_size_mlp": 64, "num_hidden_layers": 4, "attention_chunk_size": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | EXPERTS,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": MAMBA | EXPERTS | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "llama4_text": CHUNKED,
    "gpt_oss": EXPERTS,
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1},
}


def model_of(family: str) -> nn.Module:
    """A random model, whose weights are so large that a leak shows."""
    model = random_model(family, BY_SEQUENCE, **SHAPES.get(family, {}))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.15)
    return model


def measure(model: nn.Module, **settings: Any) -> LayoutProbe:
    return probe_layout(model, model, device="cpu", **settings)


@pytest.mark.parametrize(
    ("family", "level", "attention", "by_path"),
    [
        ("llama", "shared", BY_SEQUENCE, ""),
        ("gpt_oss", "shared", BY_SEQUENCE, ""),
        ("qwen3_moe", "shared", BY_SEQUENCE, ""),
        ("nemotron", "shared", BY_SEQUENCE, "2 x NemotronAttention"),  # its layers drop the segments
        ("lfm2", "shared", BY_SEQUENCE, "1 x Lfm2ShortConv"),
        ("qwen3_5_text", "shared", BY_SEQUENCE, "1 x Qwen3_5GatedDeltaNet"),
        ("granitemoehybrid", "shared", BY_SEQUENCE, "1 x GraniteMoeHybridMambaLayer"),
        ("llama4_text", "padded", "sdpa", ""),  # our attention knows no chunks
        ("mamba2", "padded", BY_SEQUENCE, ""),  # a layer gets no segments
    ],
)
def test_every_model_gets_the_best_layout_that_is_exact(family, level, attention, by_path):
    model = model_of(family)
    found = measure(model)
    assert (found.level, found.attention, found.by_path) == (level, attention, by_path), found.describe()
    assert found.error <= found.bound < 1e-3
    assert can_share_prefixes(model) == (level == "shared")
    assert layout_for("auto", model) == ("padded" if level == "padded" else "packed")


def test_every_rank_measures_the_same():
    first, second = (measure(model_of("llama")) for _ in range(2))
    assert (first.error, first.bound, first.level) == (second.error, second.bound, second.level)
    with pytest.raises(UserError, match=r"differ by 1\.0e\+00 nats"):  # as another rank measured
        measure(model_of("llama"), agree=lambda _: torch.tensor(1.0))


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "nemotron"])
@pytest.mark.parametrize("again", [False, True])
def test_layers_by_path_have_values_and_gradients_of_each_sample(family, again):
    model = model_of(family).train()
    assert measure(model).by_path
    if again:  # activations are computed again in the backward pass
        model.gradient_checkpointing_enable({"use_reentrant": False})
    check_alike(model, families(), tolerance=2e-5)


def test_a_given_layout_that_is_not_exact_is_refused_with_its_number():
    said = r"m: packed rows \(by_sequence attention\) differ by \d\.\de[+-]\d\d nats .*trainer\.layout=packed"
    with pytest.raises(UserError, match=said):
        measure(model_of("llama4_text"), layout="packed", key="m")
    assert measure(model_of("llama4_text"), layout="padded").level == "padded"
    torch_kernel = random_model("llama", "sdpa")
    assert measure(torch_kernel, layout="packed").level == "packed", "with a dense mask"


def test_chunks_longer_than_the_probe_are_never_packed():
    model = random_model("llama4_text", "sdpa", **CHUNKED | {"attention_chunk_size": 8192})
    attend_by_sequence_if_able(model)
    assert (found := measure(model)).level == "padded" and found.attention == "sdpa"


def test_an_attention_that_ignores_a_cap_is_refused():
    model: Any = random_model("gemma2", "sdpa", attn_logit_softcapping=1.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(200)
    with pytest.raises(UserError, match=r"padded rows \(sdpa attention\) differ by .*model\.attention=sdpa"):
        measure(model)
    attend_by_sequence_if_able(model)
    assert measure(model).level == "shared"


def test_a_model_whose_passes_are_random_is_refused():
    model = model_of("llama").train()
    for layer in list_layers(model):
        layer.register_forward_hook(lambda _module, _args, out: torch.nn.functional.dropout(out, 0.5))
    with pytest.raises(UserError, match=r"padded rows \(eager attention\) differ by"):
        measure(model)


class Own(LlamaForCausalLM):
    """Code that comes with a model."""


def test_code_of_its_own_is_measured_like_any_other():
    own = Own(random_model("llama").config)
    attend_by_sequence_if_able(own)
    assert find_probe(own).level == "shared"
    deaf = Own(random_model("llama").config)
    attend_by_sequence_if_able(deaf)

    def forget(_layer: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        return args, {name: x for name, x in given.items() if name != "segments"}

    for layer in list_layers(deaf):
        layer.register_forward_pre_hook(forget, with_kwargs=True)
    assert find_probe(deaf).level == "padded"


def test_another_attention_is_measured_anew():
    model: Any = random_model("llama", BY_SEQUENCE)
    assert find_probe(model).level == "shared" and find_probe(model) is find_probe(model)
    model.set_attn_implementation("sdpa")
    assert find_probe(model).level == "padded"


def test_a_value_model_with_a_new_head_is_measured_below_it(tiny_path):
    model = load_scalar_model(tiny_path, dtype="float32", attention="auto")
    found = find_probe(model)
    assert found.level == "shared" and 0 < found.error <= found.bound
    nemotron = AutoModelForSequenceClassification.from_config(random_model("nemotron").config)
    nn.init.zeros_(nemotron.score.weight)
    attend_by_sequence_if_able(nemotron)
    assert find_probe(nemotron).by_path, "whose layers drop the segments"


def test_shared_and_whole_batches_score_the_same_tokens():
    model = random_model("llama", BY_SEQUENCE)
    segments = draw_segments(model)
    whole, shared = make_batch(list_sequences(segments)), make_shared_batch(segments)
    assert torch.equal(whole.labels, shared.labels) and (shared.parents >= 0).sum() == 2
    assert len(shared.input_ids) < len(whole.input_ids)
    both = [forward(model, model, b, layout="packed", temperature=1.0).logp for b in (whole, shared)]
    torch.testing.assert_close(*both)


def test_probed_sequences_exceed_a_short_window_and_fit_positions():
    lengths = [len(s) for s in draw_segments(random_model("mistral", sliding_window=40))]
    assert lengths == [11, 13, 9, 16, 45]
    assert max(map(len, draw_segments(random_model("mistral", max_position_embeddings=12)))) == 12


def test_only_layers_that_mix_are_found():
    model = model_of("qwen3_5_text")
    batch = make_batch(list_sequences(draw_segments(model)))
    first = batch.segment_ids == 0
    with torch.no_grad():
        found = find_mixers(
            model, lambda: forward(model, model, batch, layout="packed", temperature=1.0), first, ~first
        )
    assert [type(mixer).__name__ for _, mixer in found] == ["Qwen3_5GatedDeltaNet"]


def test_the_path_of_a_segment_begins_at_its_root():
    index = Segments([2, 1, 2], [-1, 0, 0]).index_paths(torch.device("cpu"))
    assert index.places.tolist() == [[0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 3, 4]]
    assert index.back.tolist() == [0, 1, 6, 10, 11]


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_attention_that_is_causal_within_an_image_is_noticed(family, monkeypatch):
    """Gemma's tokens of an image attend to each other; with a causal kernel only transformers' own mask is left."""
    model = make_model(family)
    windowed = [m for m in (model.config.get_text_config(), *model.modules()) if getattr(m, "sliding_window", None)]
    for part in windowed:
        part.sliding_window = 4  # shorter than an image of the probe
    attend_by_sequence_if_able(model)
    assert measure(model).level == "shared"
    monkeypatch.setattr(ImageEnds, "for_layer", lambda self, window: None)
    found = measure(model)
    assert (found.level, found.attention) == ("padded", "sdpa") and len(found.refuted) == 3
    with pytest.raises(UserError, match=r"packed rows .sdpa attention.: packed rows under sdpa attention are causal"):
        measure(model, layout="packed")
    for part in windowed:
        part.sliding_window = 1024
    assert measure(model, layout="packed", has_images=False).level == "packed", "text alone is causal"
