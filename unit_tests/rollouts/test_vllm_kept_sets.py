"""Real vLLM with truncation: its kept sets and log-probabilities are the trainer's, before and after an update."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from core.types.allowed_tokens import AllowedTokens
from core.types.kept_sets import KeptSets, KeptTokens
from core.types.truncation import Truncation
from rollouts.engines.base import Completion
from rollouts.engines.vllm import VllmEngine
from rollouts.transcript import check_completion
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.models import compute_policy
from unit_tests.helpers.vllm_lab import BOUND, PROMPT, TEMPERATURE, VOCABULARY, random_model, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

RULES = Truncation(top_p=0.8, top_k=40, min_p=0.002)
FAMILY = "llama-tied"


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[tuple[VllmEngine, torch.nn.Module, asyncio.Runner]]:
    folder = tmp_path_factory.mktemp("model")
    model = save(FAMILY, folder, seed=0)
    allowed = AllowedTokens(banned=(7,))
    config = engine_config(
        folder, temperature=TEMPERATURE, stop_token_ids=[], truncation=RULES, allowed_tokens=allowed, max_model_len=512
    )
    with asyncio.Runner() as runner:
        engine = VllmEngine(config)
        yield engine, model, runner
        runner.run(engine.close())


def check_sets(model: torch.nn.Module, prompt: list[int], done: Completion) -> None:
    """The sets are those of the rules, up to tokens at their edge, and log-probabilities are over the sets."""
    check_completion(done, max_new_tokens=len(done.token_ids), is_truncated=True)
    assert done.kept is not None
    ids = torch.tensor([prompt + done.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    restricted = AllowedTokens(banned=(7,)).restrict(logits, TEMPERATURE)
    want = KeptSets.of_lists([row.nonzero()[:, 0].tolist() for row in RULES.find_kept(restricted)])
    # rounding may move a token across the edge of a set
    assert abs(done.kept.sizes - want.sizes).max() <= 1 and (done.kept.sizes == want.sizes).mean() > 0.9
    ours = compute_policy(logits, ids[0, len(prompt) :], temperature=TEMPERATURE, kept=KeptTokens.of(done.kept))
    assert (ours.logp - torch.tensor(done.logp)).abs().mean() < BOUND


def test_sets_and_log_probabilities_are_the_trainers(lab):
    engine, model, runner = lab
    # siblings, which need a request each, since sets are stored by request
    done = runner.run(engine.generate_group(PROMPT, size=12, max_new_tokens=32, seed=0))
    for completion in done:
        check_sets(model, PROMPT, completion)
    sizes = [size for c in done for size in (c.kept or KeptSets.none(0)).sizes.tolist()]
    assert len({*sizes}) > 5 and max(sizes) <= 40
    assert len({tuple(c.token_ids) for c in done}) == 12


def test_frequencies_are_the_probabilities_over_the_kept_set(lab):
    """Chi-square of 1500 draws of one token, after the prompt with the largest set."""
    engine, model, runner = lab
    n = 1500
    with torch.no_grad():
        each = model(torch.tensor([PROMPT[:64]])).logits[0] / TEMPERATURE
    at = int(RULES.find_kept(each).sum(-1).argmax())
    prompt, logits = PROMPT[: at + 1], each[at]

    async def draw() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt, max_new_tokens=1, seed=i) for i in range(n)))

    drawn = runner.run(draw())
    [kept] = {tuple(c.kept.ids.tolist()) for c in drawn if c.kept is not None}
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=VOCABULARY)
    assert counts.sum() == counts[list(kept)].sum() == n
    p = logits[list(kept)].double().softmax(-1)
    chi_square = float(((counts[list(kept)] - n * p) ** 2 / (n * p)).sum())
    degrees = len(kept) - 1
    # mean k and variance 2k: five standard deviations
    assert degrees > 5 and chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_sets_stay_with_their_tokens_across_an_update_beside_others(lab):
    """An update preempts running requests; probes and requests of other lengths share the batch."""
    engine, model, runner = lab
    other = random_model(FAMILY, seed=3)

    async def go() -> list[Completion]:
        many = [engine.generate(PROMPT[: 20 + i], max_new_tokens=20 + 7 * (i % 9), seed=i) for i in range(24)]
        running = asyncio.gather(*many)
        await asyncio.sleep(0.3)
        await engine.probe(PROMPT)
        await engine.pause()
        await engine.load_weights(1, [[(name, p.detach()) for name, p in other.named_parameters()]])
        return await running

    for i, done in enumerate(runner.run(go())):
        check_completion(done, max_new_tokens=200, is_truncated=True)
        prompt, versions = PROMPT[: 20 + i], done.versions
        cut = sum(v < 1 for v in versions)
        if cut:
            check_sets(model, prompt, done.cut(cut))
        if cut < len(versions):
            kept = None if done.kept is None else KeptSets.of_lists(lists_of(done.kept)[cut:])
            after = Completion(
                token_ids=done.token_ids[cut:], logp=done.logp[cut:], versions=versions[cut:], stop="eos", kept=kept
            )
            check_sets(other, prompt + done.token_ids[:cut], after)


def lists_of(sets: KeptSets) -> list[list[int]]:
    return [sets.ids[a:b].tolist() for a, b in zip(sets.offsets[:-1], sets.offsets[1:], strict=True)]
