"""Prices of vLLM's options: log-probabilities, speed and memory of an engine with an option, beside one without.

    python -m analysis.doctor RECIPE --knob kv_cache_dtype=fp8 --knob max_num_seqs=8

Each engine gets the trainer's weights and samples the same requests, and the trainer scores the samples. An option that
is approximate opens a gap; one that only orders work leaves it as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from analysis.doctor.bench import Bench, Sampling
from analysis.doctor.findings import Say
from analysis.doctor.gap import Gap, measure_gap
from analysis.doctor.target import Target
from configs.load import validate
from configs.rollout_schema import RolloutConfig
from configs.schema import RLConfig
from configs.strict_yaml import parse_yaml
from core.cluster.scratch import Scratch
from core.errors import UserError
from core.text.json_text import replace_non_finite
from core.types.samples import Sample
from driver.checks.engine import check_rounded
from driver.rl.setup import Prepared
from driver.start.devices import uses_gpus
from rollouts.registry import load_engine_class, resolve_engine

WITHOUT = "none"
"""Name of the engine without a knob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Effect of an option; without gap, speed and memory if vLLM refused it."""

    knob: str
    gap: Gap | None = None
    changed: float | None = None
    """Fraction of the sequences whose tokens or log-probabilities are other than without the knob, to the bit."""
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    """Memory of engine and cache: on a GPU of the device, else of the processes."""
    refused: str = ""

    def describe(self) -> str:
        """Return the price as a line."""
        if self.gap is None:
            return f"{self.knob:<40} refused: {self.refused}"
        return (
            f"{self.knob:<40} {self.gap.mean:>9.3g} {self.gap.largest:>9.2g} {self.gap.kl:>9.2g} "
            f"{self.changed:>8.0%} {self.tokens_per_s:>10.0f} {self.memory_gib:>9.2f}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the price as JSON; numbers that are not finite become null."""
        return replace_non_finite(asdict(self))


HEADER = f"{'knob':<40} {'mean':>9} {'largest':>9} {'KL':>9} {'changed':>8} {'tokens/s':>10} {'GiB':>9}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Setting of an engine that is measured."""

    name: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Option of rollout.vllm."""
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Another setting: a field of EngineConfig."""


def read_knobs(given: Sequence[str], cfg: RLConfig) -> list[Knob]:
    """Parse knobs of the form NAME=VALUE, with values in YAML. Raises UserError for one that cannot be set.

    NAME is an option of rollout.vllm, or quantization.
    """
    engine = load_engine_class(resolve_engine(cfg.rollout.engine))
    knobs: list[Knob] = []
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--knob {text!r:.100} is not of the form NAME=VALUE, such as kv_cache_dtype=fp8")
        setting = {name: parse_yaml(value, f"--knob {name}")}
        if name == "quantization":
            rollout = validate(RolloutConfig, cfg.rollout.model_dump() | setting, prefix="rollout.")
            engine.check_quantization(rollout, dtype=cfg.model.dtype, on_gpu=uses_gpus(cfg))
            check_rounded(cfg.model, rollout)
            knobs.append(Knob(name=text, changes=setting))
        else:
            engine.check_options(setting, cfg.rollout)
            knobs.append(Knob(name=text, options=setting))
    return knobs


def price_knobs(target: Target, prepared: Prepared, sampling: Sampling, knobs: Sequence[Knob], say: Say) -> list[Price]:
    """Measure an engine without a knob, and one with each."""
    with Scratch():
        return asyncio.run(_price_all(Bench(target, prepared, sampling), knobs, say))


async def _price_all(bench: Bench, knobs: Sequence[Knob], say: Say) -> list[Price]:
    say(f"\n{len(bench.requests)} sequences of at most {bench.max_new_tokens} new tokens; gaps in nats\n{HEADER}")
    usual: list[Sample] = []
    await _price(bench, Knob(name=WITHOUT), usual)  # not told: its import of vLLM would count as memory
    prices: list[Price] = []
    for knob in (Knob(name=WITHOUT), *knobs):
        prices.append(await _price(bench, knob, usual))
        say(prices[-1].describe())
    return prices


async def _price(bench: Bench, knob: Knob, usual: list[Sample]) -> Price:
    """Measure a knob. usual: samples without a knob, which the first call leaves there."""
    before = measure_memory()
    try:
        bench.open_engine(options={**bench.plan.engine.options, **knob.options}, **knob.changes)
    except UserError as error:
        if knob.name == WITHOUT:
            raise
        return Price(knob=knob.name, refused=str(error))
    try:
        await bench.push_weights()
        # twice: the first batch allocates and warms up
        await bench.sample(bench.requests)
        began = time.monotonic()
        samples = await bench.sample(bench.requests)
        seconds = time.monotonic() - began
        used = measure_memory() - before
    finally:
        await bench.engine.close()
    scored = bench.score(samples)
    gap = measure_gap(scored)
    usual.extend([] if usual else scored)
    return Price(
        knob=knob.name,
        gap=gap,
        changed=measure_changed(scored, usual),
        tokens_per_s=gap.tokens / seconds,
        memory_gib=used / 2**30,
    )


def measure_changed(samples: Sequence[Sample], usual: Sequence[Sample]) -> float:
    """Return the fraction of samples whose tokens or log-probabilities by the engine differ from the usual ones."""
    pairs = zip(samples, usual, strict=True)
    same = [
        np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.rollout_logp, other.rollout_logp)
        for one, other in pairs
    ]
    return 1 - sum(same) / len(same)


def measure_memory() -> int:
    """Return the bytes in use: on the GPU, or of this process and all children."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    own = psutil.Process()
    return sum(process.memory_info().rss for process in (own, *own.children(recursive=True)))
