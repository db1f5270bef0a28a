"""Calls and tokens of judges, counted by the driver over all groups, and the budget of a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from configs.judge_schema import JudgeBudgetConfig
from core import judge_metrics as names
from core.types.samples import Group


class JudgeSpend:
    """Calls and tokens of a run's judges so far: of training and evaluation, rejected and failed samples included."""

    def __init__(self, budget: JudgeBudgetConfig | None = None) -> None:
        self._limits = (None, None) if budget is None else (budget.calls, budget.tokens)
        self.calls = self.tokens = 0.0
        self._without_usage = 0.0
        """Calls of which the server did not say how many tokens they cost."""

    def restore(self, metrics: Mapping[str, float]) -> None:
        """Continue from the metrics of a checkpoint."""
        self.calls = metrics.get(names.JUDGE_SPENT_CALLS, 0.0)
        self.tokens = metrics.get(names.JUDGE_SPENT_TOKENS, 0.0)
        # a sum that was not measured before cannot be measured now
        self._without_usage = 0.0 if names.JUDGE_SPENT_TOKENS in metrics else self.calls

    def count(self, group: Group) -> None:
        """Add the calls and tokens of a finished group."""
        for sample in group:
            self.calls += sample.counts.get("judge/calls", 0.0)
            self._without_usage += sample.counts.get("judge/without_usage", 0.0)
            self.tokens += sample.counts.get("judge/tokens_in", 0.0) + sample.counts.get("judge/tokens_out", 0.0)

    def measure(self) -> dict[str, float]:
        """Return the sums as metrics; empty without a judge, and without tokens if a server did not report them."""
        if not self.calls:
            return {}
        tokens = {} if self._without_usage else {names.JUDGE_SPENT_TOKENS: self.tokens}
        return {names.JUDGE_SPENT_CALLS: self.calls, **tokens}

    def describe_excess(self) -> str:
        """Return a sentence if a budget is used up or cannot be measured, else ""."""
        _, tokens = self._limits
        if tokens is not None and self._without_usage:
            return (
                f"reward.judge_budget.tokens={tokens} cannot be measured, because the server of the judge reports no "
                "usage of tokens: resume with reward.judge_budget.calls in its place"
            )
        for key, spent, limit in zip(("calls", "tokens"), (self.calls, self.tokens), self._limits, strict=True):
            if limit is not None and spent >= limit:
                return f"reward.judge_budget.{key}={limit} is used up, {spent:.0f} were spent: resume with a larger one"
        return ""
