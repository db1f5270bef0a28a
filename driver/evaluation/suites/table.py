"""Results of an evaluation: a row for all prompts, for each data set, and for each value of a column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from driver.evaluation.estimators import Estimate, estimate_means, majority_at_k, pass_at_k, pass_hat_k

MEAN = "mean"
RESULTS = "results.json"
"""File of the run folder with the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedPrompt:
    """Rewards and answers of a prompt's samples."""

    labels: dict[str, str] = field(default_factory=dict[str, str])
    """Values of the columns that break down the results, such as data set and difficulty."""
    rewards: list[float]
    """Reward of each sample; 0 for a failed sample."""
    passes: list[bool]
    answers: list[str]
    """Final answer of each sample, for the vote."""
    players: list[int]
    """Side of each sample, in a game where the policy plays several; otherwise 0."""
    failed: int
    """Number of failed samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Row of the results."""

    column: str
    """Column whose value the row's prompts share; "" for all prompts."""
    value: str
    """The shared value."""
    prompts: int
    samples: int
    failed: int
    """Number of failed samples, which count as 0."""
    metrics: dict[str, Estimate]


def measure_prompt(graded: GradedPrompt, ks: Sequence[int]) -> dict[str, float]:
    """Return a prompt's estimates for every k up to its number of samples, averaged over players.

    In a game, some side may always win, so both sides together would pass whatever the policy does.
    """
    players = dict.fromkeys(graded.players)
    sides = [
        _measure_side(graded, [i for i, own in enumerate(graded.players) if own == player], ks) for player in players
    ]
    shared = [name for name in sides[0] if all(name in side for side in sides)]
    return {name: sum(side[name] for side in sides) / len(sides) for name in shared}


def _measure_side(graded: GradedPrompt, samples: Sequence[int], ks: Sequence[int]) -> dict[str, float]:
    passes, answers = [graded.passes[i] for i in samples], [graded.answers[i] for i in samples]
    n, c = len(passes), sum(passes)
    measured = {MEAN: sum(graded.rewards[i] for i in samples) / n}
    for k in (k for k in ks if k <= n):
        measured[f"pass@{k}"] = pass_at_k(n, c, k)
        if k > 1:  # with one sample the three are the same
            measured[f"pass^{k}"] = pass_hat_k(n, c, k)
            measured[f"majority@{k}"] = majority_at_k(answers, passes, k)
    return measured


def make_table(
    graded: Sequence[GradedPrompt], ks: Sequence[int], *, by: Sequence[str] = (), resamples: int, seed: int
) -> list[TableRow]:
    """Return the row of all prompts, then a row per value of every column in `by`, in order."""
    measured = [(one, measure_prompt(one, ks)) for one in graded]
    rows = [_make_row("", "all", measured, resamples=resamples, seed=seed)]
    for column in by:
        values = {one.labels[column] for one in graded if column in one.labels}
        for value in sorted(values, key=_sort_key):
            of_value = [(one, m) for one, m in measured if one.labels.get(column) == value]
            rows.append(_make_row(column, value, of_value, resamples=resamples, seed=seed))
    return rows


def _make_row(
    column: str, value: str, measured: list[tuple[GradedPrompt, dict[str, float]]], *, resamples: int, seed: int
) -> TableRow:
    """Return a row with the metrics that all prompts share, since data sets may differ in their numbers of samples."""
    shared = [name for name in measured[0][1] if all(name in m for _, m in measured)]
    values = np.array([[m[name] for name in shared] for _, m in measured])
    estimates = estimate_means(values, resamples=resamples, seed=seed)
    return TableRow(
        column=column,
        value=value,
        prompts=len(measured),
        samples=sum(len(one.passes) for one, _ in measured),
        failed=sum(one.failed for one, _ in measured),
        metrics=dict(zip(shared, estimates, strict=True)),
    )


def _sort_key(value: str) -> tuple[bool, float, str]:
    """Sort numbers by size, before texts."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    # The text "nan" is read as a number too, and has no place among numbers.
    return (True, 0.0, value) if math.isnan(number) else (False, number, value)
