"""Metrics of a step's speed, part of the registry in core/metrics.py."""

from __future__ import annotations

from core.metric import Metric, Unit

SPEED_METRICS: list[Metric] = []


def _declare(name: str, unit: Unit, meaning: str) -> str:
    SPEED_METRICS.append(Metric(name=name, unit=unit, meaning=meaning, logged_by="all runs"))
    return name


TOKENS_PER_S = _declare("tokens_per_s", "tokens/s", "trained tokens per second of the whole step")
TOKENS_PER_S_PER_DEVICE = _declare(
    "tokens_per_s_per_device", "tokens/s", "the same, per trainer rank and device of an engine"
)
TFLOPS = _declare(
    "tflops", "", "10^12 operations of the step's forward and backward passes, without what is computed again"
)
MFU = _declare(
    "mfu",
    "fraction",
    "model FLOPs utilisation: tflops over what trainer.peak_tflops allows all trainer devices in time/train_s",
)
