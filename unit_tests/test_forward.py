"""A layout is a matter of speed: every token gets the log-probability it has on its own."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data_feeds.packing import micro_batches
from trainers.forward import forward
from unit_tests.examples import some_groups

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]


def random_model(family: str, attention: str = "sdpa"):
    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shape)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)


def one_by_one(model, samples, temperature):
    """Plain transformers: one sequence, all logits, log_softmax."""
    for s in samples:
        logits = model(input_ids=torch.tensor([s.token_ids])).logits[0].float() / temperature
        logp = logits.log_softmax(-1)
        yield [float(logp[t - 1, s.token_ids[t]]) for t, yes in enumerate(s.learnt) if yes]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layout", "attention"), [("padded", "sdpa"), ("packed", "sdpa"), ("packed", "eager")])
@torch.no_grad()
def test_sequences_never_see_one_another(family, layout, attention):
    model = random_model(family, attention)
    groups = some_groups(3, 3)
    [[batch]] = micro_batches(groups, "token", 10_000)
    samples = sorted((s for g in groups for s in g), key=lambda s: -(len(s.token_ids) - 1))
    expected = torch.tensor([v for row in one_by_one(model, samples, 0.7) for v in row])
    got = forward(model, model, batch, layout=layout, temperature=0.7).logp
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_packing_would_leak_if_the_borders_were_left_out():
    """What the test above guards against is real: the same call without borders gives other numbers."""
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
    got = forward(model, model, batch, layout="padded", temperature=0.5, entropy=True).entropy
    logits = model(input_ids=batch.input_ids[None]).logits[0, batch.at] / 0.5
    torch.testing.assert_close(got, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_long_batches_are_scored_in_chunks(monkeypatch):
    model = random_model("llama")
    [[batch]] = micro_batches(some_groups(2, 2), "token", 10_000)
    whole = forward(model, model, batch, layout="padded", temperature=1.0).logp
    monkeypatch.setattr("trainers.forward.CHUNK_LOGITS", 64 * 7)
    torch.testing.assert_close(forward(model, model, batch, layout="padded", temperature=1.0).logp, whole)


def test_a_sliding_window_shorter_than_a_sequence_is_refused_when_packed_without_flash():
    model = random_model("mistral")
    model.config.sliding_window = 4
    [[batch]] = micro_batches(some_groups(1, 1), "token", 10_000)
    with pytest.raises(ValueError, match="sliding window"):
        forward(model, model, batch, layout="packed", temperature=1.0)
