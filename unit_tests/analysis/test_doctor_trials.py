"""What a trial of the doctor changes, and what it measures: on made-up numbers, and on a trainer without an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from analysis.doctor.bench import Bench, Sampling, as_sample
from analysis.doctor.gap import Gap, measure_gap
from analysis.doctor.knobs import Knob, price_knobs, read_knobs
from analysis.doctor.resampling import try_batch_of_one, try_cold_cache, try_pushed_again, try_token_by_token
from analysis.doctor.rescoring import (
    count_changed,
    fit_tokens,
    load_in,
    measure_surprise,
    search_temperature,
    try_dtypes,
    try_old_weights,
    try_other_ids,
    with_other_ids,
)
from analysis.doctor.target import find_target
from configs.schema import RLConfig
from core.errors import UserError
from core.types.images import PlacedImage
from core.types.samples import Policy, Sample
from driver.load_recipe import load_recipe
from driver.rl.setup import prepare
from rollouts.engines.base import Completion
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.image_models import draw

pytestmark = pytest.mark.usefixtures("one_thread")
GAP = Gap(mean=0.5, p99=0.5, largest=0.5, kl=0.0, tokens=20)


# ---------------------------------------------------------------- the temperature that fits


@pytest.mark.parametrize(
    ("usual", "true"),
    [(1.0, 0.7), (1.0, 1.237), (0.7, 0.312), (0.7, 2.499), (2.0, 5.345), (2.0, 5.496), (2.0, 5.702)],
)
def test_a_temperature_is_found_to_three_digits(usual, true):
    assert search_temperature(lambda t: abs(t - true), usual) == true


# ---------------------------------------------------------------- the same text, other ids


def test_other_ids_of_a_prompt_leave_the_numbers_of_the_reply():
    routes = np.arange(4, dtype=np.uint8)[:, None, None]
    own = {"versions": [-1, -1, 3, 4], "kept": [[], [], [7, 9], [8]], "routes": routes}
    sample = sample_of([5, 6, 7, 8], [False, False, True, True], **own, columns={"prox_logp": [0.0] * 4})
    longer = {"versions": [-1, -1, -1, 3, 4], "kept": [[], [], [], [7, 9], [8]], "rollout_logp": [0, 0, 0, 0.2, 0.3]}
    longer["routes"] = np.array([255, 255, 255, 2, 3], dtype=np.uint8)[:, None, None]
    mask = [False, False, False, True, True]
    assert with_other_ids(sample, lambda ids: [1, *ids], None) == sample_of([1, 5, 6, 7, 8], mask, **longer)
    other = with_other_ids(sample, lambda ids: ids, lambda _: [9, 8])
    assert other is not None and other.token_ids.tolist() == [5, 6, 9, 8]


@pytest.mark.parametrize(
    ("changes", "of_prompt", "of_reply"),
    [
        ({}, [], None),
        ({}, [5, 6], [7]),
        ({}, [5, 6], [7, 8, 9]),
        ({"images": [PlacedImage(draw(), 0, 1)]}, [5, 6], None),
        ({"kept": [[], [], [7, 9], [8]]}, [5, 6], [7, 9]),
    ],
    ids=["no prompt", "shorter reply", "longer reply", "image", "not in the kept set"],
)
def test_a_sequence_that_cannot_have_other_ids_is_left_out(changes, of_prompt, of_reply):
    sample = sample_of([5, 6, 7, 8], [False, False, True, True], **changes)
    assert with_other_ids(sample, lambda _: of_prompt, of_reply and (lambda _: of_reply)) is None


def tokenizer_of_a_pair() -> PreTrainedTokenizerFast:
    """Return a tokenizer of <s>, a, b, c and ab, which begins a text with <s>."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "a", "b", "c", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False)


def three_texts() -> list[Sample]:
    """Return c + ab in three ids, c + ab in two, and ab + c in three; each reply has log-probability 0."""
    texts = [([3, 1, 2], [False, True, True]), ([3, 4], [False, True]), ([1, 2, 3], [False, False, True])]
    return [sample_of(ids, mask, rollout_logp=[0.0] * len(ids)) for ids, mask in texts]


def test_only_sequences_with_other_ids_are_scored_again():
    def score(samples: list[Sample]) -> list[Sample]:
        """Score every token by the length of its sequence."""
        return [replace(s, columns={"prox_logp": np.float32(-len(s.token_ids)) * s.action_mask}) for s in samples]

    bench: Any = SimpleNamespace(tokenizer=SimpleNamespace(hf=tokenizer_of_a_pair()), score=score)
    found = [(t.change, t.before.mean, t.after.mean) for t in try_other_ids(bench, three_texts())]
    # the reply of the first has two ids, those of the others one: (2*3 + 2 + 3)/4, and (2 + 3)/2 without the first
    assert found == [
        ("3 of 3 sequences were scored with the text of the prompt tokenised again", 2.75, 2.5),
        (
            "3 of 3 sequences were scored with the prompt, with the tokenizer's own special tokens, tokenised again",
            *(2.75, 3.5),
        ),
        ("2 of 3 sequences were scored with the text of prompt and reply tokenised again", 2.5, 2.0),
    ]
    assert count_changed(bench, three_texts()) == 2


# ---------------------------------------------------------------- tokens drawn from another distribution


def test_the_surprise_of_sampled_tokens_is_counted_in_standard_errors():
    policies = [Policy(logp=torch.tensor([-1.0, -3.0]), entropy=torch.tensor([2.0, 1.0]))]
    policies.append(Policy(logp=torch.tensor([-1.0, -3.0]), entropy=torch.tensor([2.0, 1.0])))
    asked: list[dict[str, bool]] = []

    def run_model(batch: Policy, **options: bool) -> Policy:
        asked.append(options)
        return batch

    bench: Any = SimpleNamespace(run_model=run_model, score=lambda samples, compute: [*map(compute, samples)])
    # -1, 2, -1, 2: the mean is 0.5, the deviation 1.5, and the error of the mean of four 0.75
    assert measure_surprise(bench, policies) == pytest.approx((0.5, 0.5 / 0.75))
    assert asked == [{"entropy": True}] * 2
    equal: Any = [Policy(logp=torch.tensor([-1.0]), entropy=torch.tensor([0.5]))]
    assert measure_surprise(bench, equal) == (0.5, 0.0)


def test_the_temperature_of_drawn_tokens_is_that_of_the_highest_mean():
    def score(samples: list[Sample], compute: partial[Any]) -> list[Sample]:
        level = np.float32(-1 - (compute.keywords["temperature"] - 0.7) ** 2)
        return [replace(s, columns={"prox_logp": level * s.action_mask}) for s in samples]

    cfg = SimpleNamespace(rollout=SimpleNamespace(temperature=1.0))
    bench: Any = SimpleNamespace(cfg=cfg, score=score, run_model=print)
    assert fit_tokens(bench, three_texts()) == 0.7


# ---------------------------------------------------------------- weights and engines


class Numbers:
    """Trainer and engines whose weights are one number; every log-probability is that number below 0."""

    def __init__(self) -> None:
        self.weights, self.loaded = 2.0, 1.0
        self.requests, self.engine, self.told = [*range(10)], self, list[object]()
        self.tokenizer = SimpleNamespace(hf=tokenizer_of_a_pair())

    def copy_weights(self) -> float:
        return self.weights

    def set_weights(self, weights: float) -> None:
        self.weights = weights

    def open_engine(self, **changes: object) -> None:
        self.told.append(changes)

    async def close(self) -> None:
        self.told.append("close")

    async def push_weights(self) -> None:
        self.loaded = self.weights
        self.told.append(self.weights)

    async def sample(self, requests: list[int], *, together: bool = True) -> list[Sample]:
        self.told.append((len(requests), together))
        return [sample_of([3, 1, 2], [False, True, True], rollout_logp=[0, -self.loaded, -self.loaded])] * len(requests)

    async def sample_by_token(self, requests: list[int], *, tokens: int) -> list[Sample]:
        self.told.append((len(requests), tokens))
        return [replace(s, rollout_logp=np.float32(-1.5) * s.action_mask) for s in three_texts()]

    def score(self, samples: list[Sample]) -> list[Sample]:
        return [replace(s, columns={"prox_logp": np.float32(-self.weights) * s.action_mask}) for s in samples]


TRIALS: dict[str, tuple[Callable[[Any, list[Sample]], Any], list[object], float, float]] = {
    # what is tried: (the trial, what the engine is told, gap before, gap after); the trainer is at 2, the engine at 1
    "sent again": (lambda bench, _: try_pushed_again(bench, GAP), [2.0, (10, True)], 0.5, 0.0),
    "one by one": (lambda bench, samples: try_batch_of_one(bench, samples), [(8, False)], 1.0, 1.0),
    "token by token": (lambda bench, samples: try_token_by_token(bench, samples), [(10, 16)], 1.0, 0.5),
    "another engine": (
        lambda bench, _: try_cold_cache(bench, GAP, 1.0),
        ["close", {"prefix_cache": False}, 1.0, 2.0, (10, True)],
        *(0.5, 0.0),
    ),
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_changes_one_thing_and_leaves_the_trainers_weights(name):
    bench: Any = Numbers()
    samples = bench.score(asyncio.run(bench.sample(bench.requests)))
    bench.told.clear()
    attempt, told, before, after = TRIALS[name]
    trial = asyncio.run(attempt(bench, samples))
    assert (bench.told, trial.before.mean, trial.after.mean, bench.weights) == (told, before, after, 2.0)
    if name == "one by one":
        assert trial.change == "8 sequences were sampled one after the other"
        assert trial.before.tokens == trial.after.tokens == 16, "two tokens of each of the same eight requests"
    if name == "token by token":
        assert "(1 of 3 replies that were sampled token by token have other ids then)" in trial.means


def test_old_weights_score_the_same_samples_and_are_put_back():
    bench: Any = Numbers()
    samples = bench.score(asyncio.run(bench.sample(bench.requests)))
    trial = try_old_weights(bench, samples, GAP, 1.0)
    assert (trial.before, trial.after.mean, bench.weights) == (GAP, 0.0, 2.0)


# ---------------------------------------------------------------- the trainer of a recipe


def make_bench(path: str, **settings: Any) -> Bench:
    target = find_target(path, [])
    return Bench(target, prepare(target.loaded), Sampling(sequences=6, tokens=4, **settings))


def test_siblings_have_one_prompt_and_seeds_of_their_own(recipe):
    bench = make_bench(recipe())
    prompts = [request.prompt_ids for request in bench.requests]
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3] != prompts[4] == prompts[5]
    assert len({request.seed for request in bench.requests}) == 6
    assert bench.bound == 0.002 and bench.max_new_tokens == 4


def test_an_engine_that_rounds_may_be_further_from_the_trainer(recipe):
    path = recipe({"rollout.quantization": "int8"})
    assert make_bench(path).bound == 0.3


def test_every_transfer_is_a_new_version_from_0_on(recipe):
    bench, sent = make_bench(recipe(), bound=0.01), []

    async def transfer(version: int) -> Any:
        sent.append(version)
        return SimpleNamespace(checksums={"a": 1, "b": 2})

    async def read_fingerprint() -> Any:
        return [{"a": 1, "b": 2 + len(sent)}]

    bench.sync = SimpleNamespace(transfer=transfer)
    bench.engine = SimpleNamespace(read_fingerprint=read_fingerprint)
    said = [asyncio.run(bench.push_weights()) for _ in range(3)]
    assert sent == [0, 1, 2] and bench.bound == 0.01
    assert said == ["rank 0 loaded other values of b than were sent"] * 3


def test_a_model_is_run_again_as_the_trainer_runs_it(recipe):
    """Over the tokens that may be drawn, and with the entropy only where it is asked for."""
    bench = make_bench(recipe({"rollout.allowed_tokens": [*"0123456789"], "rollout.temperature": 0.7}))
    ids = bench.tokenizer.encode("1234")
    reply = Completion(token_ids=ids, logp=[0.0] * len(ids), versions=[0] * len(ids), stop="length")
    samples = [as_sample(request, [reply]) for request in bench.requests]
    measured: dict[tuple[bool, bool], bool] = {}

    def compute(batch: Any) -> Policy:
        for entropy, in_chunks in product((False, True), repeat=2):
            policy = bench.run_model(batch, entropy=entropy, in_chunks=in_chunks)
            measured[entropy, in_chunks] = policy.entropy is not None
        return bench.run_model(batch)

    again, own = bench.score(samples, compute), bench.score(samples)
    for sample, other in zip(again, own, strict=True):
        assert sample.columns["prox_logp"] == pytest.approx(other.columns["prox_logp"], abs=1e-6)
    assert measured == {(entropy, in_chunks): entropy for entropy, in_chunks in measured} and len(measured) == 4


def test_samples_of_another_dtype_are_those_of_a_model_in_that_dtype(recipe):
    bench = make_bench(recipe())
    reply = Completion(token_ids=[20, 21, 22, 23], logp=[0.0] * 4, versions=[0] * 4, stop="length")
    samples = [as_sample(request, [reply]) for request in bench.requests]
    rounded = bench.score(samples, partial(bench.run_model, model=load_in(bench, "bfloat16")))
    samples = [replace(s, rollout_logp=r.columns["prox_logp"]) for s, r in zip(samples, rounded, strict=True)]
    before = measure_gap(bench.score(samples))
    head, whole = try_dtypes(bench, samples, before)
    assert (head.change, whole.change) == ("scored with the head in bfloat16", "scored with the model in bfloat16")
    assert whole.after.mean == 0 < before.mean and head.after.mean != before.mean


# ---------------------------------------------------------------- knobs


def test_a_knob_is_an_option_of_vllm_or_the_rounding_of_any_engine(recipe):
    on_vllm = load_recipe(RLConfig, recipe({"backend": "ray", "rollout.engine": "vllm"}), []).cfg
    assert read_knobs(["max_num_seqs=8", "kv_cache_dtype=fp8", "enable_prefix_caching=false"], on_vllm) == [
        Knob(name="max_num_seqs=8", options={"max_num_seqs": 8}),
        Knob(name="kv_cache_dtype=fp8", options={"kv_cache_dtype": "fp8"}),
        Knob(name="enable_prefix_caching=false", options={"enable_prefix_caching": False}),
    ]
    on_hf = load_recipe(RLConfig, recipe(), []).cfg
    assert read_knobs(["quantization=int8"], on_hf) == [
        Knob(name="quantization=int8", changes={"quantization": "int8"})
    ]
    with pytest.raises(UserError, match=r"^--knob max_num_seqs.* is not valid YAML"):
        read_knobs(["max_num_seqs=[1"], on_vllm)


def test_a_price_has_the_speed_of_an_engine_with_the_trainers_weights(recipe):
    target, said = find_target(recipe(), []), list[str]()
    began = time.monotonic()
    [price] = price_knobs(target, prepare(target.loaded), Sampling(sequences=4, tokens=2), [], said.append)
    seconds = time.monotonic() - began
    assert price.gap is not None and price.tokens_per_s is not None
    assert 0 < price.gap.tokens <= 8 and price.gap.mean < 1e-4
    assert price.tokens_per_s > price.gap.tokens / seconds, "they were sampled in a part of that time"
    assert said[-1] == price.describe() and price.knob == "none"
