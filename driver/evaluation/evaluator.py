"""Evaluations of an RL run on data.eval, in place or concurrent with training, always of a single policy version.

In place, the trainers wait. In a concurrent evaluation the engines answer held-out prompts while the trainers continue.
The next weight sync waits for the answers, so that no result mixes versions. This needs overlap (max_staleness above
0). It is not used if `stop_when` or `checkpoint.best` need the result in the same step's line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import RLConfig
from core import metrics as names
from core.tasks import gather_fail_fast, start_task
from core.types.samples import Group, Prompt
from driver.records.judge_metrics import check_second_failures, measure_second
from driver.records.rollout_metrics import check_failures, count_versions, measure_groups, measure_passes
from rollouts.scheduling.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Result of an evaluation."""

    when: str
    """Time of the evaluation, such as `after step 10`."""
    metrics: dict[str, float]
    """Metrics without the prefix eval/, with `version`."""

    @property
    def version(self) -> int:
        """Number of training steps of the evaluated weights."""
        return int(self.metrics[names.VERSION])


@dataclass
class Evaluator:
    """Held-out prompts of a run, and the concurrent evaluation in progress, if any."""

    cfg: RLConfig
    prompts: list[Prompt]
    generation: Generation
    pending: asyncio.Task[list[Group]] | None = None
    when: str = ""
    """Time of the pending evaluation."""

    @property
    def decides(self) -> bool:
        """True if the end of the run or the best checkpoint depends on evaluations."""
        cfg = self.cfg
        read = [cfg.checkpoint.best or "", "" if cfg.stop_when is None else cfg.stop_when.metric]
        return any(metric.startswith(names.EVAL.format("")) for metric in read)

    def may_run_beside(self, steps_done: int) -> bool:
        """Tell whether an evaluation after `steps_done` steps can run concurrently until the next weight sync.

        Not before the last sync: the evaluation of the final weights is made in place. Nor if evaluations are as
        frequent as syncs, because two of them would end at the same sync.
        """
        cfg = self.cfg
        sync_every = cfg.weight_sync.every
        return (
            cfg.max_staleness > 0
            # Both need the result in the line of the evaluated step.
            and cfg.stop_when is None
            and not self.decides
            and cfg.eval_every > sync_every
            and steps_done % cfg.eval_every == 0
            and steps_done + sync_every < cfg.steps
        )

    def begin(self, when: str) -> None:
        """Start a concurrent evaluation."""
        self.when, self.pending = when, self.generation.start_beside(self.sample())

    async def end(self) -> EvalResult | None:
        """Wait for the concurrent evaluation; None if an engine was restarted, so that it cannot be of a single
        version.

        A restarted engine needs weights, and the trainers may have newer weights by now.
        """
        pending, self.pending = self.pending, None
        assert pending is not None
        engines = self.generation.engines

        def left_alone() -> Sequence[int]:
            return [] if engines.serving() else engines.needing_weights()  # others that serve are asked for its groups

        # Without a serving engine the groups would wait for a weight sync, and the sync waits for them.
        none_serves = start_task(engines.wait_for(left_alone))
        try:
            await asyncio.wait([pending, none_serves], return_when=asyncio.FIRST_COMPLETED)
            return self.measure(pending.result(), self.when) if pending.done() else None
        finally:
            none_serves.cancel()
            pending.cancel()

    async def sample(self) -> list[Group]:
        """Generate `eval_samples` samples of every prompt."""
        size = self.cfg.eval_samples
        # Negative tickets: their random seeds differ from those of all training groups, and are equal in every
        # evaluation.
        calls = (self.generation.generate_group(-1 - i, prompt, size) for i, prompt in enumerate(self.prompts))
        return await gather_fail_fast(calls)

    def measure(self, groups: list[Group], when: str) -> EvalResult | None:
        """Return reward, reward parts, failures and pass@k; None if the tokens are of several versions."""
        check_failures(groups, max_failed_fraction=self.cfg.reward.max_failed_fraction)
        if self.cfg.eval_reward is not None:
            check_second_failures(groups, max_failed_fraction=self.cfg.eval_reward.max_failed_fraction)
        versions = {version for group in groups for s in group for version in count_versions(s)}
        if len(versions) > 1:
            return None
        # If every sample failed before its first token, no token names a version.
        [version] = versions or {self.generation.buffer.version}
        measured = measure_groups(groups)
        shown = {k: v for k, v in measured.items() if k.startswith("reward/") or k == names.ROLLOUT_FAILED}
        passes = measure_passes(groups, pass_reward=self.cfg.eval_pass_reward)
        shown |= measure_second(groups)
        return EvalResult(when=when, metrics=shown | passes | {names.VERSION: float(version)})
