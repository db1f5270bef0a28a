"""Numbers of a token in fixed order do not depend on the batch: neighbours, order, packing, a cache, or threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from algs.sft import SFT
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import UserError
from core.types.samples import Sample
from data_feeds.packing.batches import pack
from modeling.attention_fixed import use_fixed_order
from modeling.fixed_order import fixed_order
from modeling.forward import forward
from modeling.patches import TorchDispatchMode
from rollouts.engines.base import Completion
from rollouts.engines.hf_support.invariance import check_batch_invariance
from trainers.invariant import InvariantTrainer
from unit_tests.helpers.engines import PROMPTS, engine_of, several
from unit_tests.helpers.models import packed, random_model, some_samples
from unit_tests.helpers.plain_vision import as_sample
from unit_tests.helpers.sentences import tell

THREADS = 3


def score(trainer: InvariantTrainer, samples: list[Sample], families: list[int] | None = None) -> list[float]:
    batch = pack(samples, [1.0] * len(samples), families=families)
    return trainer.forward(trainer.load(batch), measures={}).logp.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_drawn_token_has_the_trainers_bits_in_any_batch_and_packing(tiny_path, dtype):
    prompts = [*PROMPTS, [*range(5, 75)], PROMPTS[0]]
    engine = engine_of(tiny_path, dtype=dtype, batch_invariant=True)
    together = asyncio.run(several(engine, prompts, range(6), 8))
    torch.set_num_threads(THREADS)
    try:
        alone = [asyncio.run(several(engine, [prompts[i]], [i], 8))[0] for i in (0, 4)]
        backwards = asyncio.run(several(engine, prompts[::-1], range(5, -1, -1), 8))[::-1]
        assert torch.get_num_threads() == THREADS, "the caller's number is as it was"
    finally:
        torch.set_num_threads(1)
    assert [c.logp for c in together] == [c.logp for c in backwards]
    assert [together[i].logp for i in (0, 4)] == [c.logp for c in alone]
    model, settings = ModelConfig(path=tiny_path, dtype=dtype), TrainerConfig()
    trainer = InvariantTrainer(model, settings, SFT(), temperature=0.7, total_updates=1)
    samples = [as_sample(p, (), c) for p, c in zip(prompts, together, strict=True)]
    drawn = [logp for c in together for logp in c.logp]
    assert score(trainer, samples) == drawn
    assert [logp for s in samples for logp in score(trainer, [s])] == drawn
    # samples of a family share the beginnings of their prompts
    assert score(trainer, samples, [0] * len(samples)) == drawn


def test_a_short_prompt_goes_on_when_a_long_one_beside_it_has_ended(tiny_path):
    """Then all rows have padding on the left, here more of it than a block of keys."""
    engine = engine_of(tiny_path, batch_invariant=True)

    async def generate(*asked: tuple[list[int], int]) -> list[Completion]:
        calls = (engine.generate(ids, max_new_tokens=n, seed=0) for ids, n in asked)
        return await asyncio.gather(*calls)

    short, long = ([5, 6, 7], 8), ([*range(5, 55)] * 3, 1)
    alone, beside = asyncio.run(generate(short))[0], asyncio.run(generate(short, long))[0]
    assert (beside.token_ids, beside.logp) == (alone.token_ids, alone.logp) and len(alone.logp) > 2


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3"])
def test_values_and_gradients_are_those_of_the_usual_pass_but_for_rounding(family):
    """A cap and windows are in Gemma 2, windows by layer in Gemma 3, norms of heads in Qwen3."""
    model = random_model(family, "by_sequence", sliding_window=6)
    batch = packed(some_samples(9, 30, 70))

    def compute() -> tuple[Tensor, Tensor]:
        logp = forward(model, model, batch, layout="packed", temperature=0.7).logp
        return logp, torch.cat([g.flatten() for g in torch.autograd.grad(logp.square().sum(), [*model.parameters()])])

    want, gradient = compute()
    use_fixed_order(model)
    with fixed_order():
        got, own = compute()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (own - gradient).norm() < 1e-5 * gradient.norm()


@pytest.mark.parametrize(("family", "dtype"), [("gemma2", torch.float32), ("phi3", torch.bfloat16)], ids=str)
def test_a_dense_model_passes_the_probe(family, dtype):
    check_batch_invariance(random_model(family, sliding_window=40).to(dtype))


def test_the_probe_refuses_a_mixture_and_a_part_that_reads_the_whole_batch():
    with pytest.raises(UserError, match=r"rollout\.batch_invariant is true, and this model has no fixed order: a rout"):
        check_batch_invariance(random_model("qwen3_moe"))
    model = random_model("llama")
    # by less than a thousandth, which no tolerance would notice
    model.model.norm.register_forward_hook(lambda _module, _args, out: out * (1 + out.shape[1] * 1e-7))
    with pytest.raises(UserError, match=r"decoding and packed rows with shared prefixes differ at \d+ of 36 tokens"):
        check_batch_invariance(model)


def test_the_probe_refuses_a_model_that_it_cannot_set_or_cannot_decode():
    def refuse(*_: Any) -> None:
        raise RuntimeError("no cache of mine\nis of this kind")

    fails = random_model("llama")
    fails.model.norm.register_forward_hook(refuse)
    sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 8}
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **sizes))
    for model, why in (
        (bloom, "its code takes no attention by name"),
        (fails, "it cannot be decoded in fixed order (no cache of mine)"),
    ):
        assert tell(lambda model=model: check_batch_invariance(model)) == (
            f"rollout.batch_invariant is true, and this model has no fixed order: {why}; take a dense model, or leave "
            "it out"
        )


class SeenSizes(TorchDispatchMode):
    """Numbers of the first operand of each operation that is run."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor):
            self.sizes.setdefault(str(func).split(".")[1], set()).add(args[0].numel())
        return func(*args, **kwargs or {})


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tanh")},
    **{name: getattr(torch, name) for name in ("erf", "sigmoid", "rsqrt")},
    **{name: getattr(functional, name) for name in ("silu", "gelu", "softplus", "elu", "mish")},
    "pow": lambda x: x**1.5,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_function_of_each_number_gets_whole_vectors(name):
    """64 numbers at a time, however many there are; the values are those of the function."""
    x = torch.rand(3, 70, generator=torch.Generator().manual_seed(0)) + 0.1
    compute = ELEMENTWISE[name]
    with SeenSizes() as seen, fixed_order():
        got = [compute(part) for part in (x, x[:1, :5], x.T[:64, :1])]
    assert seen.sizes[name] == {256, 64}
    torch.testing.assert_close(got[0], compute(x))
    assert torch.equal(got[1], got[0][:1, :5]) and torch.equal(got[2], got[0].T[:64, :1])


def test_a_function_with_two_results_is_left_alone():
    """Its second result is for the backward pass."""
    x = torch.randn(5)
    with fixed_order():
        torch.testing.assert_close(functional.logsigmoid(x), -functional.softplus(-x))


def test_products_have_tiles_of_rows_and_sums_whole_rows():
    draw = torch.Generator().manual_seed(0)
    rows, matrix, bias = (torch.randn(*shape, generator=draw) for shape in ((37, 9), (9, 5), (5,)))
    with SeenSizes() as seen, fixed_order():
        products = [torch.mm(rows, matrix), torch.addmm(bias, rows, matrix), torch.addmm(bias, rows, matrix, beta=2)]
        sums = [rows.T.mean(-1), rows.sum(1, keepdim=True), rows.sum(0), rows.logsumexp(-1), rows.logsumexp(0)]
        sums += [rows.logsumexp(-1, keepdim=True), rows.logsumexp((0, 1))]
    assert seen.sizes["mm"] == {16 * 9} and seen.sizes["addmm"] == {5}
    wanted = [rows @ matrix, rows @ matrix + bias, rows @ matrix + 2 * bias, rows.T.mean(-1), rows.sum(1, keepdim=True)]
    wanted += [rows.sum(0), rows.logsumexp(-1), rows.logsumexp(0), rows.logsumexp(-1, keepdim=True)]
    wanted += [rows.logsumexp((0, 1))]
    for got, want in zip([*products, *sums], wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.verify
def test_a_hundred_thousand_draws_follow_the_trainers_probabilities(tmp_path):
    """Chi-square of the first two tokens over eight, in the nine contexts that they have."""
    model = random_model("llama", vocab_size=8, initializer_range=0.5, bos_token_id=None, eos_token_id=None)
    model.save_pretrained(tmp_path)
    engine = engine_of(str(tmp_path), max_batch=2048, batch_invariant=True, stop_token_ids=[])
    requests, prompt = 50_000, [5, 6, 7]
    counts = {context: torch.zeros(8) for context in [(), *((i,) for i in range(8))]}
    for first, second in (c.token_ids for c in asyncio.run(several(engine, [prompt] * requests, range(requests), 2))):
        counts[()][first] += 1
        counts[(first,)][second] += 1

    def deviate(temperature: float) -> float:
        """Return how far chi-square is above its mean, in standard deviations (Wilson and Hilferty)."""
        settings = {"temperature": temperature, "total_updates": 1}
        trainer = InvariantTrainer(ModelConfig(path=str(tmp_path), dtype="float32"), TrainerConfig(), SFT(), **settings)
        square, degrees = 0.0, 0
        for context, seen in counts.items():
            n = len(context) + 1
            done = [
                Completion(token_ids=[*context, i], logp=[0.0] * n, versions=[0] * n, stop="length") for i in range(8)
            ]
            logp = torch.tensor(score(trainer, [as_sample(prompt, (), c) for c in done])).view(8, -1)[:, -1]
            assert abs(float(logp.exp().sum()) - 1) < 1e-5
            expected = logp.exp() * seen.sum()
            live = expected > 5
            square += float(((seen - expected)[live] ** 2 / expected[live]).sum())
            degrees += int(live.sum()) - 1
        part = 2 / (9 * degrees)
        return ((square / degrees) ** (1 / 3) - 1 + part) / part**0.5

    assert sum(int(seen.sum()) for seen in counts.values()) == 2 * requests
    assert abs(deviate(0.7)) < 3.5
    assert deviate(0.73) > 5, "the test notices a temperature that is wrong by a twentieth"
