"""Compare engine and trainer; where they disagree, change one thing at a time and name the one that closes the gap.

    1. the engine receives the weights, samples, and the trainer scores      the gap after the first sync
    2. the trainer's weights are moved a little, and sent to the engine
    3. the engine samples the same requests again                           the gap after an update
    4. if one of the two is too large: every toggle, each by itself

The move of step 2 is random noise, as large as it must be to tell old weights from new ones. It is never saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from analysis.doctor.bench import Bench, Sampling, Weights
from analysis.doctor.findings import Say
from analysis.doctor.gap import Gap, collect, measure_gap
from analysis.doctor.resampling import (
    try_batch_of_one,
    try_cold_cache,
    try_float32,
    try_pushed_again,
    try_token_by_token,
)
from analysis.doctor.rescoring import (
    count_changed,
    fit_tokens,
    measure_surprise,
    try_dtypes,
    try_old_weights,
    try_other_ids,
    try_routes,
    try_temperatures,
)
from analysis.doctor.target import Target
from analysis.doctor.trials import Trial
from analysis.doctor.verdict import Facts, Verdict, decide
from core.cluster.scratch import Scratch
from core.text.json_text import replace_non_finite
from core.types.samples import Sample
from driver.rl.setup import Prepared
from modeling.model_files import explain_gap

MOVE_BOUNDS, MOST_MOVED = 25, 0.5
"""Change of the log-probabilities to which the weights are moved: in bounds, and at most in nats."""
MOVES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Size of the noise, as a part of the size of each tensor's numbers."""
SMALLEST_SIZE = 0.02
"""Smallest size of a tensor's numbers; half of a new adapter is zero and must move too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Result of an examination."""

    verdict: Verdict
    facts: Facts
    trials: list[Trial]
    about: dict[str, Any]
    """Engine, dtype and temperature."""

    def to_json(self) -> dict[str, Any]:
        """Return the examination as JSON; numbers that are not finite become null."""
        facts: dict[str, Any] = {
            **self.about,
            **asdict(self.facts),
            "trials": [trial.to_json(self.facts.bound) for trial in self.trials],
            "verdict": self.verdict.kind,
            "cause": None if self.verdict.cause is None else str(self.verdict.cause),
            "sentence": self.verdict.sentence,
        }
        return replace_non_finite(facts)


def examine(target: Target, prepared: Prepared, sampling: Sampling, say: Say) -> Examined:
    """Run the examination in this process, with the temporary folder of a run."""
    with Scratch():
        return asyncio.run(_examine(target, prepared, sampling, say))


async def _examine(target: Target, prepared: Prepared, sampling: Sampling, say: Say) -> Examined:
    bench = Bench(target, prepared, sampling)
    cfg = bench.cfg
    say(
        f"\nengine {cfg.rollout.engine} and the local trainer in this process, {cfg.model.dtype}, temperature "
        f"{cfg.rollout.temperature:g}; {len(bench.requests)} sequences of at most {bench.max_new_tokens} new tokens"
    )
    bench.open_engine()
    # old and new weights must differ visibly, or an engine that ignores an update would pass
    trials: list[Trial] = []
    try:
        first_difference = await bench.push_weights()
        first = bench.score(await bench.sample(bench.requests))
        say(f"after the first sync    {measure_gap(first).describe()}")
        old = bench.copy_weights()
        moved = move_weights(bench, first)
        difference = await bench.push_weights()
        second = bench.score(await bench.sample(bench.requests))
        say(f"after an update         {measure_gap(second).describe()} (log-probabilities moved by {moved:.2g})")
        surprise, sigmas = measure_surprise(bench, second)
        facts = Facts(
            bound=bench.bound,
            first=measure_gap(first),
            second=measure_gap(second),
            moved=moved,
            changed=count_changed(bench, second),
            sequences=len(second),
            fingerprint=difference or first_difference,
            surprise=surprise,
            sigmas=sigmas,
        )
        say(facts.describe_rest())
        if not facts.second.mean <= facts.bound:
            say(f"\n{'toggle':<16} {'before':>9} -> {'after':<9} {'':<10} change")
            async for trial in run_trials(bench, second, facts.second, old):
                say(trial.describe(facts.bound))
                trials.append(trial)
        fitted = fit_tokens(bench, second) if facts.draws_otherwise else None
    finally:
        # also after an error: an engine may have processes of its own
        await bench.engine.close()
    hints = explain_gap(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    verdict = decide(facts, trials, temperature=cfg.rollout.temperature, fitted=fitted, hints=hints)
    say(f"\n{verdict.sentence}")
    about = {"engine": cfg.rollout.engine, "dtype": cfg.model.dtype, "temperature": cfg.rollout.temperature}
    return Examined(verdict=verdict, facts=facts, trials=trials, about=about)


async def run_trials(bench: Bench, samples: list[Sample], gap: Gap, old: Weights) -> AsyncIterator[Trial]:
    """Yield every trial, the most specific first: the first that closes the gap names the cause.

    Scores of the same tokens come before new samples, and those before another engine. Requests for single tokens are
    made of that engine, so they say something only where it has not closed the gap by itself.
    """
    for trial in try_temperatures(bench, samples, gap):
        yield trial
    for trial in try_dtypes(bench, samples, gap):
        yield trial
    for trial in try_routes(bench, samples, gap):
        yield trial
    yield try_old_weights(bench, samples, gap, old)
    for trial in try_other_ids(bench, samples):
        yield trial
    yield await try_batch_of_one(bench, samples)
    yield await try_pushed_again(bench, gap)
    cold = await try_cold_cache(bench, gap, old)
    yield cold
    if not cold.closes(bench.bound):
        yield await try_token_by_token(bench, samples)
    async for trial in try_float32(bench, gap):
        yield trial


@torch.no_grad()
def move_weights(bench: Bench, samples: list[Sample]) -> float:
    """Add noise to the trainer's weights until old and new differ visibly.

    Return the mean change of the samples' log-probabilities, in nats.
    """
    start = bench.copy_weights()
    # generated on the CPU, so that every device gets the same noise
    generator = torch.Generator().manual_seed(bench.cfg.seed)
    noise = [torch.randn(w.shape, generator=generator).to(w.device) for w in start]
    sizes = [max(float(w.float().square().mean().sqrt()), SMALLEST_SIZE) for w in start]
    _, before = collect(samples)
    moved, wanted = 0.0, min(MOVE_BOUNDS * bench.bound, MOST_MOVED)
    for share in MOVES:
        # always from the start, so that the moves do not add up
        bench.set_weights([w + share * size * n for w, n, size in zip(start, noise, sizes, strict=True)])
        _, after = collect(bench.score(samples))
        moved = float(abs(after - before).mean())
        if moved >= wanted:
            break
    return moved
