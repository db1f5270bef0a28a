"""Speculative decoding of real vLLM: its tokens are drawn from the model's own probabilities, with their values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollouts.engines.base import Completion
from rollouts.engines.vllm import VllmEngine
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.vllm_lab import SHAPE, gap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

VOCABULARY = 8
"""Small, so that a draft is nearly always found, and often right."""
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
TEMPERATURE = 0.8


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = SHAPE | {"vocab_size": VOCABULARY, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[tuple[VllmEngine, LlamaForCausalLM, asyncio.Runner]]:
    folder = tmp_path_factory.mktemp("model")
    model = make_model(0)
    model.save_pretrained(folder)
    settings = {"temperature": TEMPERATURE, "stop_token_ids": [0], "options": {"speculative_config": NGRAM}}
    with asyncio.Runner() as runner:
        engine = VllmEngine(engine_config(folder, **settings))
        yield engine, model, runner
        runner.run(engine.close())


async def draw(engine: VllmEngine, seeds: Sequence[int], *, tokens: int = 48) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(PROMPT, max_new_tokens=tokens, seed=seed) for seed in seeds))


def probabilities(model: LlamaForCausalLM, done: Completion, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Return those of every token of the vocabulary at each place of a completion, [T, V] float64."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + done.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    return (logits / temperature).double().softmax(-1)


def gap_of(model: LlamaForCausalLM, done: Completion, begin: int = 0, end: int | None = None) -> float:
    at = torch.tensor(done.token_ids)
    ours = probabilities(model, done).log()[torch.arange(len(at)), at]
    return gap(ours[begin:end].tolist(), done.logp[begin:end])


def find_drafts(ids: Sequence[int]) -> list[int]:
    """Return the token that followed each token of a completion the last time, else 0: a likely draft."""
    follower: dict[int, int] = {}
    found: list[int] = []
    for before, token in zip([PROMPT[-1], *ids], ids, strict=False):
        found.append(follower.get(before, 0))
        follower[before] = token
    return found


def measure_draws(model: LlamaForCausalLM, done: Sequence[Completion], temperature: float) -> tuple[float, float]:
    """Return two statistics of the draws, both 0 +- 1: chi-square, and the surplus of the tokens that drafts would be.

    Given the tokens before it, u = F(token - 1) + U p(token) is uniform, whatever the model, so all u are independent.
    """
    uniform = torch.Generator().manual_seed(0)
    drawn: list[torch.Tensor] = []
    surplus = variance = 0.0
    for one in done:
        p, at = probabilities(model, one, temperature), torch.tensor(one.token_ids)[:, None]
        below = (p.cumsum(-1) - p).gather(-1, at)
        drawn.append((below + p.gather(-1, at) * torch.rand(at.shape, generator=uniform))[:, 0])
        drafts = torch.tensor(find_drafts(one.token_ids))[:, None]
        likely = p.gather(-1, drafts)
        surplus += float(((at == drafts).double() - likely).sum())
        variance += float((likely * (1 - likely)).sum())
    bins = 32
    counts = torch.histc(torch.cat(drawn), bins, 0.0, 1.0)
    expected = float(counts.sum()) / bins
    degrees, chi_square = bins - 1, float(((counts - expected) ** 2 / expected).sum())
    # mean k and variance 2k
    return (chi_square - degrees) / (2 * degrees) ** 0.5, surplus / variance**0.5


def test_log_probabilities_are_the_models_and_the_seed_decides(lab):
    engine, model, runner = lab
    done = runner.run(draw(engine, range(24), tokens=20))
    drafted, accepted = (sum(getattr(one.drafts, name) for one in done) for name in ("drafted", "accepted"))
    assert drafted > 100 and 0.05 < accepted / drafted < 0.95
    assert max(gap_of(model, one) for one in done) < 1e-4
    assert {one.stop for one in done} == {"eos", "length"} and all(0 not in one.token_ids[:-1] for one in done)
    alone = runner.run(draw(engine, [5], tokens=20))
    assert alone[0].token_ids == done[5].token_ids, "a request's tokens do not depend on its batch"


def test_running_requests_follow_a_weight_sync(lab):
    """Drafts of requests that an update interrupts are checked by the new weights."""
    engine, model, runner = lab
    other = make_model(1)

    async def load(new: LlamaForCausalLM, version: int) -> None:
        await engine.pause()
        await engine.load_weights(version, [[(name, p.detach()) for name, p in new.named_parameters()]])

    async def go(wait_s: float) -> list[Completion]:
        running = asyncio.create_task(draw(engine, range(16), tokens=200))
        await asyncio.sleep(wait_s)
        await load(other, 1)
        return await running

    for wait_s in (0.3, 1.0, 0.1, 3.0):  # the machine may be fast or busy
        done = runner.run(go(wait_s))
        runner.run(load(model, 0))
        cuts = [sum(version < 1 for version in one.versions) for one in done]
        if was_interrupted := any(0 < cut < len(one.versions) for cut, one in zip(cuts, done, strict=True)):
            break
    assert was_interrupted
    for one, cut in zip(done, cuts, strict=True):
        assert not cut or gap_of(model, one, 0, cut) < 1e-4
        assert cut == len(one.versions) or gap_of(other, one, cut) < 1e-4


@pytest.mark.verify
def test_drawn_tokens_have_the_models_probabilities(lab):
    engine, model, runner = lab
    done = runner.run(draw(engine, range(1500)))
    right, wrong = (measure_draws(model, done, TEMPERATURE * factor) for factor in (1.0, 1.1))
    print(f"{sum(len(one.token_ids) for one in done)} tokens: {right}, at another temperature {wrong}")
    assert max(map(abs, right)) < 5
    assert max(map(abs, wrong)) > 5, "the statistics see a temperature that is wrong by a tenth"
