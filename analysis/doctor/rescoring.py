"""Rescoring toggles: the trainer scores the same sequences in another way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from analysis.doctor.bench import Bench, Weights
from analysis.doctor.gap import Gap, collect, measure_gap
from analysis.doctor.trials import Toggle, Trial
from core.types.kept_sets import KeptSets
from core.types.routes import extend
from core.types.samples import Sample
from data_feeds.chat.decoding import decode_exactly
from modeling.head import ScoringHead
from modeling.load import DTYPES, load_model
from modeling.nf4 import Nf4Linear

GRID = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Factors of the run's temperature that are tried first."""
REFINEMENTS = 16
"""Steps of the search between two of them; each leaves 0.62 of the interval."""
SEARCH_SEQUENCES = 8
"""Sequences on which a temperature is searched; it is then tried on all."""
GOLDEN = (math.sqrt(5) - 1) / 2
OTHER = {"float32": "bfloat16", "bfloat16": "float32"}


def try_temperatures(bench: Bench, samples: Sequence[Sample], before: Gap) -> Iterator[Trial]:
    """Score at the temperature that fits best the returned log-probabilities, unless that is the run's own."""
    few, usual = samples[:SEARCH_SEQUENCES], bench.cfg.rollout.temperature
    fitted = search_temperature(lambda t: measure_gap(score_at(bench, few, t)).mean, usual)
    if f"{fitted:g}" == f"{usual:g}":
        return
    after = measure_gap(score_at(bench, samples, fitted))
    yield Trial(
        toggle=Toggle.TEMPERATURE,
        change=f"scored at temperature {fitted:g} instead of {usual:g}",
        before=before,
        after=after,
        means=f"the engine samples at temperature {fitted:g} and the trainer scores at {usual:g}",
    )


def score_at(bench: Bench, samples: Sequence[Sample], temperature: float) -> list[Sample]:
    return bench.score(samples, partial(bench.run_model, temperature=temperature))


def search_temperature(cost: Callable[[float], float], usual: float) -> float:
    """Return the temperature of the smallest cost: the best of a grid, refined, and rounded if that costs little.

    usual: temperature of the run, around which the grid lies.

    >>> search_temperature(lambda t: abs(t - 0.7), 1.0), search_temperature(lambda t: abs(t - 0.7123), 1.0)
    (0.7, 0.712)
    """
    costs = {factor: cost(usual * factor) for factor in GRID}
    at = GRID.index(min(GRID, key=lambda factor: costs[factor]))
    # in logarithms: a temperature acts as a factor
    low, high = (math.log(usual * GRID[max(0, min(i, len(GRID) - 1))]) for i in (at - 1, at + 1))
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)  # golden section
    of_left, of_right = cost(math.exp(left)), cost(math.exp(right))
    for _ in range(REFINEMENTS):
        if of_left < of_right:
            high, right, of_right = right, left, of_left
            left = high - GOLDEN * (high - low)
            of_left = cost(math.exp(left))
        else:
            low, left, of_left = left, right, of_right
            right = low + GOLDEN * (high - low)
            of_right = cost(math.exp(right))
    best, found = min((of_left, math.exp(left)), (of_right, math.exp(right)))
    for digits in (1, 2, 3):  # what somebody would have written into a setting
        rounded = round(found, digits)
        # the second bound is for a cost near 0, of which no share is large enough
        if rounded > 0 and abs(rounded - found) <= 0.01 * found and cost(rounded) <= max(1.5 * best, 1e-5):
            return rounded
    return round(found, 3)


def try_dtypes(bench: Bench, samples: Sequence[Sample], before: Gap) -> Iterator[Trial]:
    """Score with the head, and then with the whole model, in the other dtype."""
    own = bench.cfg.model.dtype
    other = OTHER[own]
    model: Any = bench.trainer.model
    head = model.get_output_embeddings()
    if isinstance(head, ScoringHead):
        # not in chunks: they install a function of their own in the head, which would replace this one
        with head.computing(partial(compute_logits, head, dtype=DTYPES[other])):
            after = measure_gap(bench.score(samples, partial(bench.run_model, in_chunks=False)))
        yield Trial(
            toggle=Toggle.DTYPE,
            change=f"scored with the head in {other}",
            before=before,
            after=after,
            means=f"the engine computes its head in {other} and the trainer in {own}",
        )
    after = measure_gap(bench.score(samples, partial(bench.run_model, model=load_in(bench, other))))
    yield Trial(
        toggle=Toggle.DTYPE,
        change=f"scored with the model in {other}",
        before=before,
        after=after,
        means=f"the engine computes in {other} and the trainer in {own}",
    )


def compute_logits(head: Any, hidden: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Compute logits in this dtype."""
    return linear(hidden.to(dtype), head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype))


@torch.no_grad()
def load_in(bench: Bench, dtype: str) -> nn.Module:
    """Return a second model with the trainer's weights, in this dtype.

    Layers in four bits are linear layers there, with what the trainer dequantises: rounded to its own dtype.
    """
    cfg = bench.cfg.model
    model = load_model(
        cfg.path,
        dtype=dtype,
        attention=cfg.attention,
        lora=cfg.lora,
        trust_remote_code=cfg.trust_remote_code,
    ).to(bench.trainer.device)
    own = dict(bench.trainer.model.named_parameters())
    packed = {f"{name}.weight": m for name, m in bench.trainer.model.named_modules() if isinstance(m, Nf4Linear)}
    for name, parameter in model.named_parameters():
        # from the trainer and not from the files: its weights have been moved since
        parameter.copy_(packed[name].weight if name in packed else own[name])
    return model


def try_routes(bench: Bench, samples: Sequence[Sample], before: Gap) -> Iterator[Trial]:
    """Score with the experts that the engine chose, if it reports them and the recipe does not replay them."""
    routes = bench.trainer.routes
    if routes is None or routes.forces:
        return
    routes.forces = True
    try:
        after = measure_gap(bench.score(samples))
    finally:
        routes.forces = False
    yield Trial(
        toggle=Toggle.ROUTES,
        change="scored with the experts that the engine chose",
        before=before,
        after=after,
        means="the routers of engine and trainer choose other experts (rollout.router_replay: replay forces the same)",
    )


def try_old_weights(bench: Bench, samples: Sequence[Sample], before: Gap, old: Weights) -> Trial:
    """Score with the weights that the engine had before the last sync."""
    current = bench.copy_weights()
    bench.set_weights(old)
    after = measure_gap(bench.score(samples))
    # the next trials score with the weights that the engine should have
    bench.set_weights(current)
    return Trial(
        toggle=Toggle.WEIGHTS,
        change="scored with the weights from before the last sync",
        before=before,
        after=after,
        means="the engine still samples from the weights before the last sync",
    )


def try_other_ids(bench: Bench, samples: Sequence[Sample]) -> Iterator[Trial]:
    """Score other token ids of the same text, if there are any: of the prompt, and of prompt and reply."""
    variants = {
        "the text of the prompt": (partial(encode_again, bench), None),
        "the prompt, with the tokenizer's own special tokens,": (partial(encode_again, bench, adds=True), None),
        "the text of prompt and reply": (partial(encode_again, bench), partial(encode_again, bench)),
    }
    for what, (of_prompt, of_reply) in variants.items():
        pairs = [(sample, with_other_ids(sample, of_prompt, of_reply)) for sample in samples]
        kept = [(old, new) for old, new in pairs if new is not None]
        if not any(len(o.token_ids) != len(n.token_ids) or (o.token_ids != n.token_ids).any() for o, n in kept):
            continue
        yield Trial(
            toggle=Toggle.TOKENISED_AGAIN,
            change=f"{len(kept)} of {len(samples)} sequences were scored with {what} tokenised again",
            before=measure_gap(bench.score([old for old, _ in kept])),
            after=measure_gap(bench.score([new for _, new in kept])),
            means=f"the engine tokenises {what} again, and uses other ids than the trainer",
        )


def encode_again(bench: Bench, ids: list[int], *, adds: bool = False) -> list[int]:
    """Return the ids of the text of `ids`; adds: with special tokens."""
    hf = bench.tokenizer.hf
    return hf.encode(decode_exactly(hf, ids, special=True), add_special_tokens=adds)


def count_changed(bench: Bench, samples: Sequence[Sample]) -> int:
    """Return the number of sequences whose text has other ids when it is tokenised again."""
    return sum(encode_again(bench, sample.token_ids.tolist()) != sample.token_ids.tolist() for sample in samples)


def with_other_ids(
    sample: Sample,
    of_prompt: Callable[[list[int]], list[int]],
    of_reply: Callable[[list[int]], list[int]] | None,
) -> Sample | None:
    """Return the sample with other ids; None if it cannot have them.

    It cannot with images, whose positions refer to its own tokens, nor with a reply of another length, or with a token
    outside of its kept set.
    """
    if sample.images:
        return None
    # the first True, and so the length of the prompt
    given = int(np.argmax(sample.action_mask))
    prompt, reply = sample.token_ids[:given].tolist(), sample.token_ids[given:].tolist()
    new_prompt = of_prompt(prompt)
    new_reply = reply if of_reply is None else of_reply(reply)
    # the engine's log-probabilities belong to its tokens one by one
    if len(new_reply) != len(reply) or not new_prompt:
        return None
    n = len(new_prompt)
    ids = np.array([*new_prompt, *new_reply], dtype=np.int32)
    kept, routes = sample.kept, sample.routes
    if kept is not None:
        kept = KeptSets.join([KeptSets.none(n), kept.take(np.arange(given, len(kept)))])
        if not kept.contain(ids)[n:].all():
            return None
    if routes is not None:
        # the engine chose experts for its own prompt; those of another are unknown
        routes = np.concatenate([extend(routes[:0], n), routes[given:]])
    return replace(
        sample,
        token_ids=ids,
        action_mask=np.array([False] * n + [True] * len(reply)),
        rollout_logp=np.concatenate([np.zeros(n, dtype=np.float32), sample.rollout_logp[given:]]),
        versions=np.concatenate([np.full(n, -1, dtype=np.int32), sample.versions[given:]]),
        kept=kept,
        routes=routes,
        columns={},
    )


def measure_surprise(bench: Bench, samples: Sequence[Sample]) -> tuple[float, float]:
    """Return the mean surprise of the sampled tokens, -logp - entropy in nats, and its number of standard errors.

    It is 0 on average if the tokens were drawn from the distribution that the trainer has; below 0 from a sharper one.
    """
    surprise: list[float] = []

    def compute(batch: Any) -> Any:
        policy = bench.run_model(batch, entropy=True)
        assert policy.entropy is not None
        surprise.extend((-policy.logp - policy.entropy).tolist())
        return policy

    bench.score(samples, compute)
    values = np.array(surprise)
    # given the tokens before it each surprise has mean 0, so those of a sequence are uncorrelated
    error = float(values.std() / math.sqrt(len(values)))
    return float(values.mean()), float(values.mean() / error) if error else 0.0


def fit_tokens(bench: Bench, samples: Sequence[Sample]) -> float:
    """Return the temperature at which the sampled tokens are most probable."""

    def cost(temperature: float) -> float:
        _, trainer = collect(score_at(bench, samples, temperature))
        return -float(trainer.mean())

    return search_temperature(cost, bench.cfg.rollout.temperature)
