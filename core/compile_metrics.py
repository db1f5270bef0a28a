"""Metrics of compiled blocks (`trainers/compiled.py`), part of the registry in core/metrics.py."""

from __future__ import annotations

from core.metric import Metric

COMPILE_COUNT, COMPILE_SECONDS = "compile/count", "compile/seconds"
_BY = "all runs with trainer.compile"
COMPILE_METRICS = [
    Metric(
        name=f"train/{COMPILE_COUNT}",
        unit="",
        meaning="compilations since the step before: many in the first step, later those of a new kind of pass",
        logged_by=_BY,
    ),
    Metric(
        name=f"train/{COMPILE_SECONDS}",
        unit="seconds",
        meaning="seconds that they took, on the rank with the most",
        logged_by=_BY,
    ),
]
