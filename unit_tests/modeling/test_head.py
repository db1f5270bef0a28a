"""The head in chunks is a matter of memory: every number is that of all logits at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from algs import find_algorithm
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.errors import UserError
from core.types.measures import ENTROPY
from core.types.samples import Policy
from data_feeds.packing.batches import micro_batches
from modeling.forward import forward
from modeling.head import choose_chunk, use_scoring_head
from trainers.local import LocalTrainer
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.models import FAMILIES, packed, random_model, some_samples

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = 4096
"""A vocabulary of which 1 MiB holds 12 tokens' logits in a chunk."""
OWN = {
    **{family: {"final_logit_softcapping": 0.3} for family in ("gemma2", "gemma3_text")},
    "granite": {"logits_scaling": 3.0},
}
"""What a family does to its logits after the head; strong enough to be seen."""


def score(model: nn.Module, *, mib: int, entropy: bool = True, temperature: float = 0.7, lengths=(9, 20, 20, 3, 30)):
    batch = packed(some_samples(*lengths))
    return forward(
        model,
        model,
        batch,
        layout="padded",
        temperature=temperature,
        measures=ENTROPY if entropy else {},
        logits_mib=mib,
    )


def gradient(model: nn.Module, policy: Policy) -> Tensor:
    loss = policy.logp.square().sum() + (policy.entropy.sin().sum() if policy.entropy is not None else 0.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])


def check_alike(model: nn.Module, bound: float, **how) -> None:
    whole, chunked = score(model, mib=0, **how), score(model, mib=1, **how)
    n_tokens, size = len(whole.logp), choose_chunk(model, len(whole.logp), 1)
    assert size and n_tokens > 3 * size and n_tokens % size, "several chunks, the last of them shorter"
    for name in ("logp", "entropy"):
        ours, want = getattr(chunked, name), getattr(whole, name)
        if want is None:
            assert ours is None
            continue
        assert ours.dtype == torch.promote_types(model.dtype, torch.float32) and ours.shape == (n_tokens,)
        assert (ours - want).norm() < bound * want.norm()
    want = gradient(model, whole)
    assert (gradient(model, chunked) - want).norm() < bound * want.norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-7), (torch.float32, 1e-5)], ids=["f64", "f32"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_chunks_give_the_numbers_of_all_logits_at_once(family, tied, dtype, bound):
    model = random_model(family, vocab_size=WIDE, tie_word_embeddings=tied, **OWN.get(family, {})).to(dtype)
    check_alike(model, bound)


@pytest.mark.parametrize("family", sorted(OWN))
def test_what_a_family_does_after_its_head_is_seen_here(family):
    """Else the test above would pass without it."""
    off = {"gemma2": None, "gemma3_text": None, "granite": 1.0}
    plain = random_model(family, vocab_size=WIDE, **dict.fromkeys(OWN[family], off[family]))
    scaled = random_model(family, vocab_size=WIDE, **OWN[family])
    assert (score(plain, mib=1).logp - score(scaled, mib=1).logp).abs().max() > 0.01


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_at_every_temperature_with_and_without_entropy(temperature, entropy):
    check_alike(random_model("qwen3", vocab_size=WIDE), 1e-5, temperature=temperature, entropy=entropy)


def test_with_checkpointed_layers():
    model = random_model("llama", vocab_size=WIDE).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_alike(model, 1e-5)


def test_a_head_with_a_bias_and_a_family_nobody_tested():
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": WIDE, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape), attn_implementation="sdpa").eval()
    model.lm_head.bias = nn.Parameter(torch.randn(WIDE))
    use_scoring_head(model)
    check_alike(model, 1e-5)


def test_only_what_is_trained_gets_a_gradient():
    model = random_model("llama", vocab_size=WIDE)
    model.lm_head.requires_grad_(False)
    check_alike(model, 1e-5)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    check_alike(model, 1e-5)


def test_a_bfloat16_head_gets_a_gradient_as_exact_as_from_one_product():
    model = random_model("llama", vocab_size=WIDE).bfloat16()

    def of_head(mib: int) -> Tensor:
        policy = score(model, mib=mib, entropy=False, lengths=(60,) * 12)  # about 45 chunks
        [grad] = torch.autograd.grad(policy.logp.sum(), [model.lm_head.weight])
        return grad.double()

    at_once, chunked = of_head(0), of_head(1)
    model.double()
    right = of_head(0)
    assert (chunked - right).norm() < 1.1 * (at_once - right).norm()


def test_where_the_logits_fit_nothing_changes():
    model = random_model("llama", vocab_size=WIDE)
    assert choose_chunk(model, 21, 1) is None and choose_chunk(model, 22, 1) == 12
    assert choose_chunk(model, 10**9, 0) is None, "0 never cuts"
    seen = []
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    fits, always = score(model, mib=2, lengths=(9,)), score(model, mib=0, lengths=(9,))
    assert torch.equal(fits.logp, always.logp) and torch.equal(fits.entropy, always.entropy)
    assert torch.equal(gradient(model, fits), gradient(model, always))
    assert seen == [(1, len(fits.logp), WIDE)] * 2


class Saved:
    """Numbers that autograd keeps for the backward pass in tensors that end in the vocabulary."""

    def __init__(self) -> None:
        self.logits = 0

    def count(self, x: Tensor) -> Tensor:
        self.logits += x.numel() if x.shape[-1:] == (WIDE,) else 0
        return x


def peak_bytes(model: nn.Module, mib: int) -> tuple[int, int]:
    """Highest sum of allocations minus releases in forward and backward pass; and logits kept between the two."""
    saved = Saved()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        with torch.autograd.graph.saved_tensors_hooks(saved.count, lambda x: x):
            policy = score(model, mib=mib, entropy=False, lengths=(60,) * 24)
        policy.logp.sum().backward()
    model.zero_grad()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest, saved.logits


def test_no_more_logits_are_alive_than_the_budget_holds():
    model = random_model("llama", vocab_size=WIDE).requires_grad_(False)
    model.model.norm.requires_grad_(True)  # so that all memory is the head's
    n_tokens = len(score(model, mib=0, lengths=(60,) * 24).logp)
    whole, kept = peak_bytes(model, 0)
    assert whole > 2 * 4 * n_tokens * WIDE and kept >= n_tokens * WIDE, "what the budget is for"
    chunked, kept = peak_bytes(model, 1)
    rest = 8 * 4 * 60 * 24 * 64  # eight copies of the hidden states, of 64 numbers each
    assert kept == 0
    assert chunked < 2**20 + rest < whole / 4


def test_a_model_that_changes_its_logits_in_another_way_is_refused():
    model = random_model("cohere", vocab_size=WIDE, logit_scale=0.5)
    before = score(model, mib=0).logp
    with pytest.raises(UserError, match=r"^trainer\.logits_mib: .* cohere .* set trainer\.logits_mib=0"):
        score(model, mib=1)
    assert torch.equal(score(model, mib=0).logp, before), "the head is as it was"


def test_a_head_that_is_no_linear_layer_is_refused():
    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input).clamp(max=9.0)

    model = random_model("llama", vocab_size=WIDE)
    model.lm_head.__class__ = Own
    with pytest.raises(UserError, match="no plain linear layer"):
        score(model, mib=1)


def test_logits_that_are_not_numbers_are_the_losss_matter():
    """A diverged model's update is skipped by the trainer; it must not be taken for an unknown model."""
    model = random_model("llama", vocab_size=WIDE)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    assert score(model, mib=1).logp.isnan().all()


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory) -> str:
    folder: Path = tmp_path_factory.mktemp("wide")
    random_model("llama", vocab_size=WIDE, tie_word_embeddings=True).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(r=4)], ids=["weights", "adapter"])
@pytest.mark.parametrize("name", ["grpo", "sft", "opd"])
def test_a_step_is_the_same_update_with_the_same_metrics(wide_path, lora, name, checkpointing):
    def learn(mib: int):
        torch.manual_seed(0)
        cfg = TrainerConfig(lr=1e-2, logits_mib=mib, gradient_checkpointing=checkpointing)
        model = ModelConfig(path=wide_path, dtype="float32", lora=lora)
        alg = {"name": name} | ({"teacher": wide_path} if name == "opd" else {})
        trainer = LocalTrainer(model, cfg, find_algorithm(alg)[1](**alg), temperature=0.9, total_updates=10)
        start = trainer.flatten_weights()
        [micro] = micro_batches(some_groups(), "token", 10_000)
        columns = trainer.compute_columns(micro, trainer.alg.required_columns)
        for batch, found in zip(micro, columns, strict=True):
            batch.tokens = batch.tokens.replace(**found)
        metrics = [trainer.step([micro]) for _ in range(3)]
        return metrics, columns, trainer.flatten_weights(), start

    want, scored, weights, start = learn(0)
    got, got_scored, got_weights, _ = learn(1)
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for ours, theirs in zip(got_scored, scored, strict=True):
        for column, values in theirs.items():
            torch.testing.assert_close(ours[column], values, atol=1e-5, rtol=1e-5)
    assert (got_weights - weights).norm() < 1e-3 * (weights - start).norm()
