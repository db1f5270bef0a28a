"""Metrics of judges, from the counts and notes of samples. core/judge_metrics.py declares their names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core import judge_metrics as names
from core.types.samples import Sample

SUMS = {
    "calls": names.JUDGE_CALLS,
    "retries": names.JUDGE_RETRIES,
    "tokens_in": names.JUDGE_TOKENS_IN,
    "tokens_out": names.JUDGE_TOKENS_OUT,
    "unanswered": names.JUDGE_UNANSWERED,
}
"""Counts that are added up over the samples of a step."""


def measure_judges(samples: Sequence[Sample]) -> dict[str, float]:
    """Measure the calls of judges over all samples, failed ones included; empty without a judge."""
    totals: dict[str, float] = {}
    for sample in samples:
        for name, value in sample.counts.items():
            if name.startswith("judge/"):
                totals[name.removeprefix("judge/")] = totals.get(name.removeprefix("judge/"), 0.0) + value
    if not totals:
        return {}
    calls, cached = totals.get("calls", 0.0), totals.get("cached", 0.0)
    measured = {metric: totals.get(name, 0.0) for name, metric in SUMS.items()}
    if calls + cached:
        measured[names.JUDGE_CACHED] = cached / (calls + cached)
    if calls:
        measured[names.JUDGE_UNREADABLE] = totals.get("unreadable", 0.0) / calls
    if votes := totals.get("votes", 0.0):
        measured[names.JUDGE_AGREEMENT] = totals["agreed"] / votes
    seconds = [note["seconds"] for s in samples for note in s.notes if "seconds" in note and not note.get("cached")]
    if seconds:
        median, late = np.quantile(seconds, [0.5, 0.95])
        measured |= {names.JUDGE_SECONDS_P50: float(median), names.JUDGE_SECONDS_P95: float(late)}
    return measured
