"""Metrics of judges, from the counts and notes of samples. core/judge_metrics.py declares their names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core import judge_metrics as names
from core.errors import RunStopped
from core.types.arrays import Floats
from core.types.samples import Sample
from rollouts.second_reward import AUTHOR, FAILED, MEAN, PREFIX

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
    if totals.get("without_usage"):  # else the tokens of some calls would look like those of all
        del measured[names.JUDGE_TOKENS_IN], measured[names.JUDGE_TOKENS_OUT]
    if calls + cached:
        measured[names.JUDGE_CACHED] = cached / (calls + cached)
    if calls:
        measured[names.JUDGE_UNREADABLE] = totals.get("unreadable", 0.0) / calls
    if anchors := totals.get("anchors", 0.0):
        measured[names.JUDGE_ANCHOR_ERROR] = totals["anchor_errors"] / anchors
    if votes := totals.get("votes", 0.0):
        measured[names.JUDGE_AGREEMENT] = totals["agreed"] / votes
    seconds = [note["seconds"] for s in samples for note in s.notes if "seconds" in note and not note.get("cached")]
    if seconds:
        median, late = np.quantile(seconds, [0.5, 0.95])
        measured |= {names.JUDGE_SECONDS_P50: float(median), names.JUDGE_SECONDS_P95: float(late)}
    return measured


def measure_second(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Measure the second reward of held-out samples, and how far it agrees with the first; empty without one."""
    samples = [sample for group in groups for sample in group if PREFIX + FAILED in sample.counts]
    if not samples:
        return {}
    measured = {names.SECOND_FAILED: sum(sample.counts[PREFIX + FAILED] for sample in samples)}
    scored = [sample for sample in samples if PREFIX + MEAN in sample.counts]
    for name in sorted({name for sample in scored for name in sample.counts if name.startswith(PREFIX)}):
        if name != PREFIX + FAILED:
            values = [sample.counts[name] for sample in scored if name in sample.counts]
            measured[names.SECOND.format(name.removeprefix(PREFIX))] = sum(values) / len(values)
    pairs = np.array([(s.reward, s.counts[PREFIX + MEAN]) for s in scored if s.reward is not None]).reshape(-1, 2)
    if len(pairs) > 1 and (corr := correlate(pairs - pairs.mean(axis=0))) is not None:
        measured[names.SECOND_CORR] = corr
    return measured


def check_second_failures(groups: Sequence[Sequence[Sample]], *, max_failed_fraction: float) -> None:
    """Raise RunStopped if the second reward failed too many samples, quoting the first failure."""
    scored = [sample for group in groups for sample in group if PREFIX + FAILED in sample.counts]
    failed = [sample for sample in scored if sample.counts[PREFIX + FAILED]]
    if len(failed) > max_failed_fraction * len(scored):
        first = next(note["text"] for note in failed[0].notes if note["by"] == AUTHOR)
        raise RunStopped(
            f"eval_reward failed {len(failed)} of {len(scored)} samples, more than eval_reward.max_failed_fraction="
            f"{max_failed_fraction:g}; the first: {first}"
        )


def correlate(pairs: Floats) -> float | None:
    """Return Pearson's correlation of two centred columns, [n, 2]; None without a spread."""
    spread = np.sqrt((pairs**2).sum(axis=0))
    # a spread of rounding alone would make a correlation of noise
    if not (spread > 1e-9).all():
        return None
    return float((pairs[:, 0] * pairs[:, 1]).sum() / spread.prod())
