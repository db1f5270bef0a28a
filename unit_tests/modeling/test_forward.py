"""A layout is a matter of speed: every token gets the log-probability it has on its own."""

from functools import cache

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from core.types.measures import ENTROPY
from data_feeds.packing.batches import micro_batches
from modeling.attention import BY_SEQUENCE
from modeling.forward import compute_states, compute_values, forward
from modeling.layout_probe import layout_for
from modeling.load import load_model, load_scalar_model
from modeling.softmax import Softmax
from unit_tests.helpers.alone import alone, check_alike, one_by_one
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.models import FAMILIES, compute_policy, packed, random_model, some_samples

KERNELS = [
    ("padded", "sdpa"),
    ("packed", "sdpa"),
    ("packed", "eager"),
    ("padded", BY_SEQUENCE),
    ("packed", BY_SEQUENCE),
]


LENGTHS = (9, 9, 6, 20, 20, 20, 3, 9)


@cache
def of_family(family: str, attention: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What each sequence has on its own; every kernel is compared with it."""
    return alone(random_model(family, attention), some_samples(*LENGTHS))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(("layout", "attention"), KERNELS)
def test_sequences_never_see_one_another(family, layout, attention):
    expected = of_family(family, "eager" if attention == "eager" else "sdpa")
    check_alike(random_model(family, attention), expected, some_samples(*LENGTHS), layout)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3"])
def test_by_sequence_a_sliding_window_is_kept_exactly(family):
    window = {"sliding_window": 4}
    if family in ("qwen2", "qwen3"):
        window |= {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    samples = some_samples(4, 5, 6, 12, 12, 20)
    expected = alone(random_model(family, **window), samples)
    unbounded = one_by_one(random_model(family, **window | {"sliding_window": 64}), samples, 0.7)
    assert (expected[0] - unbounded).abs().max() > 0.01, "the window matters here"
    for layout in ("padded", "packed"):
        check_alike(random_model(family, BY_SEQUENCE, **window), expected, samples, layout)


@torch.no_grad()
def test_a_value_is_read_before_the_token_at_the_position_that_predicts_it(tiny_path):
    model = load_scalar_model(tiny_path, dtype="float32", attention="sdpa")
    nn.init.normal_(model.score.weight)
    [sample] = some_samples(9)
    hidden = model.model(input_ids=torch.tensor([sample.token_ids])).last_hidden_state[0]
    want = [model.score(hidden[t - 1])[0] for t, yes in enumerate(sample.loss_mask) if yes]
    got = compute_values(model, packed([sample]), layout="padded", model=model)[0]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-5, rtol=1e-4)


def test_rows_are_packed_where_the_kernel_takes_borders(tiny_path):
    def layout(attention):
        return layout_for("auto", load_model(tiny_path, dtype="float32", attention=attention))

    assert (layout("auto"), layout("sdpa"), layout("eager")) == ("packed", "padded", "padded")
    assert layout_for("auto", load_scalar_model(tiny_path, dtype="float32", attention="auto")) == "packed"


def test_by_sequence_neither_a_mask_nor_a_cache_is_taken():
    model, ids = random_model("llama", BY_SEQUENCE), torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="neither a mask nor a cache"):
        model(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1]]))
    seen = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="neither a mask nor a cache"):
        model(input_ids=ids, past_key_values=seen)


@torch.no_grad()
def test_packing_would_leak_if_the_borders_were_left_out():
    """Show that the test above guards against something real: without borders the same call gives other numbers."""
    model = random_model("llama")
    [[batch]] = micro_batches(some_groups(3, 3), "token", 10_000)
    right = forward(model, model, batch, layout="packed", temperature=1.0).logp
    leaky = model(input_ids=batch.input_ids[None], use_cache=False).logits[0, batch.at].log_softmax(-1)
    assert (leaky.gather(-1, batch.labels[:, None])[:, 0] - right).abs().max() > 0.01


@torch.no_grad()
def test_the_head_runs_on_learnt_positions_only():
    model = random_model("llama")
    [[batch]] = micro_batches(some_groups(2, 2), "token", 10_000)
    seen = []
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    forward(model, model, batch, layout="padded", temperature=1.0)
    assert seen == [(1, len(batch.labels), 64)]
    assert len(batch.labels) < len(batch.input_ids)


@torch.no_grad()
def test_entropy_is_that_of_the_distribution_sampled_from():
    model = random_model("llama")
    [[batch]] = micro_batches(some_groups(1, 1), "token", 10_000)
    got = forward(model, model, batch, layout="padded", temperature=0.5, measures=ENTROPY).entropy
    logits = model(input_ids=batch.input_ids[None]).logits[0, batch.at] / 0.5
    torch.testing.assert_close(got, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_positions_begin_anew_with_every_sequence(layout):
    """A model that adds a learnt vector to each position, which relative positions would not show."""
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape), attn_implementation="sdpa").eval()
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(50)
    samples = some_samples(9, 9, 6, 20, 3)
    check_alike(model, alone(model, samples), samples, layout)


@torch.no_grad()
def test_half_precision_logits_are_normalised_in_float32():
    logits, labels = torch.randn(40, 64).mul(8).bfloat16(), torch.arange(40)
    got = compute_policy(logits, labels, temperature=0.7, measures=ENTROPY)
    want = (logits.double() / 0.7).log_softmax(-1)
    assert got.logp.dtype == torch.float32 and got.entropy.dtype == torch.float32
    picked = want.gather(-1, labels[:, None])[:, 0].float()
    torch.testing.assert_close(got.logp, picked, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy, -(want.exp() * want).sum(-1).float(), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_long_batches_are_scored_in_chunks(monkeypatch):
    model = random_model("llama")
    [[batch]] = micro_batches(some_groups(2, 2), "token", 10_000)
    whole = forward(model, model, batch, layout="padded", temperature=1.0).logp
    monkeypatch.setattr("modeling.softmax.CHUNK_LOGITS", 64 * 7)
    torch.testing.assert_close(forward(model, model, batch, layout="padded", temperature=1.0).logp, whole)


class Widths(Softmax):
    """Softmax that notes how many logits it computes at a time, and computes nothing."""

    def compute(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        self.measures[logits.numel()] = rows
        return logits[None, :, 0]


def test_logits_are_upcast_in_pieces_of_64_mib():
    seen: dict = {}
    softmax = Widths(labels=torch.zeros(5), temperature=1.0, measures=seen)
    found = softmax.compute_at_once(torch.arange(5.0)[:, None].expand(5, 2**23))
    assert found.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]
    assert seen == {2 * 2**23: slice(2, 4), 2**23: slice(4, 5)} and 4 * max(seen) == 64 * 2**20


@pytest.mark.parametrize("mib", [0, 1])
def test_a_model_is_called_through_the_module_that_wraps_it(mib):
    """As DeepSpeed's engine does, which has no head of its own."""
    model = random_model("llama", vocab_size=4096)
    [[batch]] = micro_batches(some_groups(2, 2), "token", 10_000)
    calls: list[dict] = []

    class Engine(nn.Module):
        def forward(self, **inputs):
            calls.append(inputs)
            return model(**inputs)

    plain = forward(model, model, batch, layout="padded", temperature=0.7, logits_mib=mib)
    wrapped = forward(Engine(), model, batch, layout="padded", temperature=0.7, logits_mib=mib)
    assert torch.equal(wrapped.logp, plain.logp) and len(calls) == 1
    states = compute_states(Engine(), model, batch, layout="padded")
    assert torch.equal(states, compute_states(model, model, batch, layout="padded")) and len(calls) == 2


def test_packing_without_flash_refuses_windows_shorter_than_a_sequence():
    model = random_model("mistral")
    model.config.sliding_window = 4
    [[batch]] = micro_batches(some_groups(1, 1), "token", 10_000)
    with pytest.raises(ValueError, match="sliding window"):
        forward(model, model, batch, layout="packed", temperature=1.0)
