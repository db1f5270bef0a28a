"""Metrics of episode counts: turns, tool calls, errors. core/metrics.py declares their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from configs.agent_schema import SLOW, TIMEOUTS
from core import metrics as names
from core.draft_metrics import ROLLOUT_ACCEPTED, ROLLOUT_DRAFTED
from core.game_metrics import ROLLOUT_DRAWN, ROLLOUT_OPPONENT, ROLLOUT_WON
from core.types.drafts import ACCEPTED, DRAFTED
from core.types.samples import Sample
from rollouts.opponents import DRAWN, VERSION, WON

MEANS = {
    "turns": names.ROLLOUT_TURNS,
    "tool_calls": names.ROLLOUT_TOOL_CALLS,
    "tool_seconds": names.ROLLOUT_TOOL_SECONDS,
    WON: ROLLOUT_WON,
    DRAWN: ROLLOUT_DRAWN,
    VERSION: ROLLOUT_OPPONENT,
}
"""Counts with a named metric, the mean over episodes."""
ERRORS = "tool_errors"
"""Prefix of error counts: all errors, and errors of a kind (tool_errors/raised)."""
FRACTIONS = {
    names.ROLLOUT_REWRITTEN: ("assistant/rewritten", ("assistant/rewritten", "assistant/repeated")),
    names.ROLLOUT_KEPT: ("tokens/kept", ("tokens/sampled",)),
    ROLLOUT_ACCEPTED: (ACCEPTED, (DRAFTED,)),
}
"""Metrics defined as a count, summed over episodes, divided by other counts."""
SUMS = {TIMEOUTS: names.ROLLOUT_TIMEOUTS, SLOW: names.ROLLOUT_SLOW, DRAFTED: ROLLOUT_DRAFTED}
"""Counts of which the metric is the sum over episodes."""
WITHOUT_MEAN = (ERRORS, "assistant", "tokens", "judge", "second", "agent", "drafts")
"""Prefixes of counts used only in other metrics."""


def measure_counts(samples: Sequence[Sample]) -> dict[str, float]:
    """Compute metrics from the episodes' counts; empty without counts."""
    episodes = [sample.counts for sample in samples if sample.counts]
    counted = sorted({name for counts in episodes for name in counts})
    measured: dict[str, float] = {}
    for name in counted:
        if name.partition("/")[0] not in WITHOUT_MEAN:
            # An episode without this count is left out: it did not count 0.
            values = [counts[name] for counts in episodes if name in counts]
            measured[MEANS.get(name, names.ROLLOUT_COUNT.format(name))] = sum(values) / len(values)
    measured |= {
        metric: sum(one.get(name, 0.0) for one in episodes) for name, metric in SUMS.items() if name in counted
    }
    return measured | _measure_errors(episodes) | _measure_fractions(episodes)


def _measure_errors(episodes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Compute error counts as fractions of tool calls; empty without tool calls."""
    calls = sum(counts.get("tool_calls", 0.0) for counts in episodes)
    if not calls:
        return {}

    def share(name: str) -> float:
        return sum(counts.get(name, 0.0) for counts in episodes) / calls

    kinds = {names.ROLLOUT_TOOL_ERROR.format(kind): share(f"{ERRORS}/{kind}") for kind in get_args(names.ToolErrorKind)}
    return {names.ROLLOUT_TOOL_ERRORS: share(ERRORS)} | kinds


def _measure_fractions(episodes: Sequence[dict[str, float]]) -> dict[str, float]:
    def total(*counts: str) -> float:
        return sum(one.get(name, 0.0) for one in episodes for name in counts)

    return {name: total(part) / whole for name, (part, of) in FRACTIONS.items() if (whole := total(*of))}
