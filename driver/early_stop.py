"""Early end of a run by a metric (`stop_when`)."""

from __future__ import annotations

from collections.abc import Mapping

from configs.trainer_schema import StopWhenConfig
from core.errors import UserError, quote
from core.metrics import STEP_NUMBER, TRAIN_SKIPPED, find_metric


class EarlyStop:
    """Counter of consecutive values that satisfy the condition. A resumed run starts at 0."""

    def __init__(self, when: StopWhenConfig | None):
        self.when, self.in_a_row, self.is_logged, self.is_first = when, 0, False, True
        self.reason = ""
        """Reason to end the run now; "" otherwise."""

    def note_step(self, metrics: Mapping[str, float]) -> str:
        """Check the metrics of a step; return a sentence if the first of this process lacks the metric, else "".

        Raises UserError at step 0 for a metric of the user's that it does not log.
        """
        when, is_first, self.is_first = self.when, self.is_first, False
        if when is None or self.reason:
            return ""
        value = metrics.get(when.metric)
        if value is None:
            # A step without the metric neither counts nor breaks the row: evaluations are not made at every step.
            self._check_name(when.metric, metrics)
            waits = is_first and not when.metric.startswith("eval/")
            return f"stop_when.metric={quote(when.metric)}: the first step has not logged it" if waits else ""
        self.is_logged = True
        is_met = value > when.above if when.above is not None else when.below is not None and value < when.below
        self.in_a_row = self.in_a_row + 1 if is_met else 0
        if self.in_a_row >= when.for_steps:
            bound = f"above {when.above:g}" if when.above is not None else f"below {when.below:g}"
            times = f", {when.for_steps} times in a row" if when.for_steps > 1 else ""
            self.reason = f"stop_when: {when.metric} is {value:g}, {bound}{times}"
        return ""

    def end(self, reason: str) -> None:
        """End the run now for another reason, such as a budget."""
        self.reason = self.reason or reason

    def describe_unlogged(self) -> str | None:
        """Return a sentence if the run has never logged the metric; None otherwise."""
        if self.when is None or self.is_logged:
            return None
        return f"stop_when.metric={quote(self.when.metric)}: no step of this run has logged it, and so it had no effect"

    def _check_name(self, name: str, metrics: Mapping[str, float]) -> None:
        """Raise UserError unless the metric may be missing at this step, or the run is beyond the first step."""
        # Declared metrics may be absent: of a source without rows in the step, of tools that nobody called. Later steps
        # must not raise, because the trained model would be lost.
        may_be_absent = name.startswith("eval/") or find_metric(name) is not None
        if metrics[STEP_NUMBER] > 0 or metrics.get(TRAIN_SKIPPED) or may_be_absent:
            return
        raise UserError(f"stop_when.metric={quote(name)} is not logged; a step logs {', '.join(sorted(metrics))}")
